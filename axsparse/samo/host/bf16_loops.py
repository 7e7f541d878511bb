"""Loads the compiled loops on bf16 where there is numba, and a processor with the instructions."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


@cache
def bf16_loops(name: str) -> Any:
    """The module `samo/host/<name>.py`; None if numba is missing, or an instruction."""
    try:
        vectors = importlib.import_module("axsparse.samo.host.bf16_vectors")
    except ImportError:
        return None
    has_all = vectors.features() >= vectors.FEATURES
    return importlib.import_module(f"axsparse.samo.host.{name}") if has_all else None


@cache
def multiplies_matrices() -> bool:
    """Whether the processor has an instruction for whole matrices of bf16 (AMX)."""
    try:
        vectors = importlib.import_module("axsparse.samo.host.bf16_vectors")
    except ImportError:
        return False
    return vectors.MATRIX_FEATURE in vectors.features()
