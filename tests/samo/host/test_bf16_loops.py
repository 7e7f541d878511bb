"""Which processors the loops on bf16 are compiled for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from axsparse.samo.host import compiled_loops as bf16_loops
from axsparse.samo.host.compiled_loops import (
    can_compile,
    cpu_features,
    has_bf16_loops,
    multiplies_matrices,
)

ALL = "+avx512bf16,+avx512vbmi2"


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """What was found for this processor is found anew."""
    for each in (has_bf16_loops, cpu_features):
        each.cache_clear()
    yield
    for each in (has_bf16_loops, cpu_features):
        each.cache_clear()


@pytest.mark.parametrize(
    ("features", "has_loops", "has_matrices"),
    [
        ("+avx2,+avx512f", False, False),
        ("+avx512bf16", False, False),
        ("-avx512bf16,+avx512vbmi2", False, False),
        (ALL, True, False),
        (f"{ALL},+amx-bf16", True, True),
        (f"{ALL},-amx-bf16", True, False),
    ],
)
def test_loops_are_for_processors_with_all_of_their_instructions(
    features: str, has_loops: bool, has_matrices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_compile():
        pytest.skip("numba is not installed")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)

    assert (has_bf16_loops(), multiplies_matrices()) == (has_loops, has_matrices)


def test_without_numba_there_are_no_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bf16_loops, "can_compile", lambda: False)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", f"{ALL},+amx-bf16")

    assert (has_bf16_loops(), multiplies_matrices()) == (False, False)
