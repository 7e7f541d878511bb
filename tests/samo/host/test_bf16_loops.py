"""Which processors the loops on bf16 are compiled for."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from axsparse.samo.host.bf16_loops import bf16_loops, multiplies_matrices

ALL = "+avx512bf16,+avx512vbmi2"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was found for this processor is found anew."""
    found = bf16_loops, multiplies_matrices
    for each in found:
        each.cache_clear()
    yield
    for each in found:
        each.cache_clear()


@pytest.mark.parametrize("features", ["+avx2,+avx512f", "+avx512bf16", f"-avx512bf16,{ALL[12:]}"])
def test_without_an_instruction_there_are_no_loops(
    features: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = pytest.importorskip("axsparse.samo.host.bf16_vectors")
    monkeypatch.setattr(vectors.config, "CPU_FEATURES", features)

    assert bf16_loops("sampling_loops") is None
    assert not multiplies_matrices()


@pytest.mark.parametrize("more", ["", ",+amx-bf16", ",-amx-bf16"])
def test_loops_are_compiled_for_what_numba_is_told_of_the_processor(
    more: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = pytest.importorskip("axsparse.samo.host.bf16_vectors")
    monkeypatch.setattr(vectors.config, "CPU_FEATURES", ALL + more)

    assert bf16_loops("sampling_loops").sample
    assert bf16_loops("sparse_linear_loops").put
    assert multiplies_matrices() == more.startswith(",+")


def test_without_numba_there_are_no_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "axsparse.samo.host.bf16_vectors", None)

    assert bf16_loops("sparse_linear_loops") is None
    assert not multiplies_matrices()
