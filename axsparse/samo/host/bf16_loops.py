"""The compiled loops on bf16, where there is numba, and a processor with the instructions."""

from __future__ import annotations

from functools import cache

from axsparse.samo.host.compiled_loops import Loop, can_compile, cpu_features

FEATURES = {"avx512bf16", "avx512vbmi2"}
"""The processor's instructions that the loops need."""
MATRIX_FEATURE = "amx-bf16"
"""That of processors which multiply whole matrices at once."""
LENGTHS = (64, 128, 256)
"""Tokens of the panels of which `sample` takes the columns."""
TILE = 64
"""Tokens whose sums `add_products` keeps in registers."""

TRANSPOSE = Loop("axsparse.samo.host.bf16_vectors", "transpose")
SAMPLE = Loop("axsparse.samo.host.sampling_loops", "sample")
ADD_PRODUCTS = Loop("axsparse.samo.host.sparse_linear_loops", "add_products")
PUT = Loop("axsparse.samo.host.sparse_linear_loops", "put")


@cache
def has_bf16_loops() -> bool:
    """Whether the loops can be compiled and run here."""
    return can_compile() and cpu_features() >= FEATURES


def multiplies_matrices() -> bool:
    """Whether the processor has an instruction for whole matrices of bf16 (AMX)."""
    return can_compile() and MATRIX_FEATURE in cpu_features()
