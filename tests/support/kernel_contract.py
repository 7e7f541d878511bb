"""All that the kernels promise: `CONTRACT` has each promise for each case, by name."""

from __future__ import annotations

from support import kernel_contract_compress, kernel_contract_step
from support.kernel_machine import PROMISES, Promise

CONTRACT: dict[str, Promise] = PROMISES
"""Filled by the modules that are imported here."""
WRITTEN_IN = (kernel_contract_compress, kernel_contract_step)
