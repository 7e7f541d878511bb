"""The version of the package, in a place that every room may read."""

from __future__ import annotations

__version__ = "0.1.0"
