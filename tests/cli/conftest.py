"""The fixture that carries out a command in this process."""

from __future__ import annotations

from support.commands import axsparse as axsparse
