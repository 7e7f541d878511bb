"""Loops that are compiled once for all runs of a user, by a process next to the rank."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from axsparse.samo.host import compiled_loops
from axsparse.samo.host.compiled_loops import (
    CompileError,
    Loop,
    cache_folder,
    can_compile,
    cpu_features,
    has_bf16_loops,
    multiplies_matrices,
)

pytestmark = pytest.mark.skipif(not can_compile(), reason="needs numba")

MODULE = "axsparse.samo.index.mask_loops"
USE = """
import sys
import torch
from axsparse.samo.host.host_step import sum_of_squares
assert sum_of_squares(torch.ones(100_000)) == 100_000
assert not {"numba"} & sys.modules.keys(), "numba is loaded"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache."""
    monkeypatch.setenv("AXSPARSE_CACHE", str(tmp_path))
    cache_folder.cache_clear()
    yield tmp_path / "loops"
    cache_folder.cache_clear()


def assert_divides(loop: Loop) -> None:
    """Four of six entries in rows of three."""
    columns, ends = np.zeros(4, np.int32), np.zeros(2, np.int64)
    loop(np.array([0, 2, 3, 5], np.int32), 3, columns, ends)
    assert (columns.tolist(), ends.tolist()) == ([0, 2, 0, 2], [2, 4])


def divide() -> Loop:
    return Loop(MODULE, "divide")


def test_a_second_start_compiles_nothing_and_a_broken_file_is_compiled_again(folder: Path) -> None:
    assert_divides(divide())
    [path] = folder.glob("*.o")
    content = path.read_bytes()

    with mock.patch.object(compiled_loops, "_compiled", side_effect=AssertionError):
        assert_divides(divide())
    for broken in (b"", content[:100], content[:-1] + b"\0\0"):
        path.write_bytes(broken)
        assert_divides(divide())

        assert len(path.read_bytes()) > compiled_loops.DIGEST


def test_of_ranks_that_start_at_once_one_compiles_and_the_others_find_it(folder: Path) -> None:
    compiling = compiled_loops._compiled
    with (
        mock.patch.object(compiled_loops, "_compiled", side_effect=compiling) as compiles,
        ThreadPoolExecutor(3) as ranks,
    ):
        for each in [ranks.submit(assert_divides, divide()) for _ in range(3)]:
            each.result()

    compiles.assert_called_once()
    assert len([*folder.glob("*.o")]) == 1


@pytest.mark.usefixtures("folder")
def test_what_cannot_be_compiled_says_why() -> None:
    with pytest.raises(CompileError, match=r"AttributeError: .*has no attribute 'missing'"):
        Loop(MODULE, "missing").load(())
    with pytest.raises(CompileError, match="TypingError"):
        divide().load(("none", "none", "none", "none"))


def test_a_rank_does_not_load_numba() -> None:
    subprocess.run([sys.executable, "-c", USE], check=True, timeout=300)


@pytest.fixture
def other_processor() -> Iterator[None]:
    """The properties of this processor are found anew."""
    for each in (has_bf16_loops, cpu_features):
        each.cache_clear()
    yield
    for each in (has_bf16_loops, cpu_features):
        each.cache_clear()


@pytest.mark.usefixtures("other_processor")
@pytest.mark.parametrize(
    ("features", "has_loops", "has_matrices"),
    [
        ("+avx2,+avx512f", False, False),
        ("+avx512bf16", False, False),
        ("-avx512bf16,+avx512vbmi2", False, False),
        ("+avx512bf16,+avx512vbmi2", True, False),
        ("+avx512bf16,+avx512vbmi2,+amx-bf16", True, True),
        ("+avx512bf16,+avx512vbmi2,-amx-bf16", True, False),
    ],
)
def test_loops_on_bf16_are_for_processors_with_all_of_their_instructions(
    features: str, has_loops: bool, has_matrices: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)

    assert (has_bf16_loops(), multiplies_matrices()) == (has_loops, has_matrices)
    has_bf16_loops.cache_clear()
    monkeypatch.setattr(compiled_loops, "can_compile", lambda: False)
    assert (has_bf16_loops(), multiplies_matrices()) == (False, False)
