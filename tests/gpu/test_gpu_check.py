"""What `scripts/gpu_check.sh` does before it has a GPU: arguments, rows, JSON, exit codes, MPI."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.mpirun import LONGEST_SECONDS, TESTS

BENCHMARKS = TESTS.parent / "benchmarks"
SCRIPT = TESTS.parent / "scripts" / "gpu_check.sh"
SEEN = {"missing": [], "device": "NVIDIA H200", "torch": "2.11", "MPI": "MPICH", "CuPy": "14"}
Said = tuple[str, str]
pytestmark = pytest.mark.skipif(not SCRIPT.exists(), reason="scripts/ is not here")


def load(name: str) -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def check() -> ModuleType:
    return load("gpu_check")


def said(rows: list[Any]) -> list[Said]:
    return [(row.check, row.outcome) for row in rows]


# -- the command ----------------------------------------------------------------------------


def test_without_a_gpu_the_command_says_so_and_ends_with_69(tmp_path: Path) -> None:
    own = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path)}
    ended = subprocess.run(
        ["sh", str(SCRIPT)],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )

    assert ended.stdout == "gpu_check: no CUDA device is here; every part is skipped\n"
    assert ended.returncode == 69, ended.stderr
    assert not list(tmp_path.iterdir())


# -- parts, on a machine that is told of ----------------------------------------------------


class Parts:
    """Parts that end as told, and where they save."""

    def __init__(self, check: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._check, self._patch = check, monkeypatch
        self.folder = folder
        self.began: list[str] = []
        monkeypatch.setattr(check, "environment", lambda _: ([], None))
        monkeypatch.setattr(check.Host, "look", lambda _: dict(SEEN))

    def end(self, part: str, outcome: str) -> None:
        def run(_: object) -> tuple[list[Any], dict[str, int]]:
            self.began.append(part)
            if outcome == "breaks":
                raise KeyError("compress, torch")
            return [self._check.Row(part, "x", outcome)], {"n": 1}

        self._patch.setitem(self._check.RUN, part, run)

    def call(self, *words: str, file: str = "found.json") -> int:
        code: int = self._check.main([*words, "--save", str(self.folder / file)])
        return code

    def saved(self, file: str = "found.json") -> Any:
        return json.loads((self.folder / file).read_text())

    def rows(self, file: str = "found.json") -> list[tuple[str, str, str]]:
        checks = [row for row in self.saved(file)["checks"] if row["check"] != "seconds"]
        return [(row["part"], row["outcome"], row["measured"]) for row in checks]


@pytest.fixture
def parts(check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Parts:
    return Parts(check, monkeypatch, tmp_path)


def test_a_check_that_fails_is_the_exit_code_and_calls_add_up(
    parts: Parts, capsys: pytest.CaptureFixture[str]
) -> None:
    parts.end("kernels", "fail")
    parts.end("speed", "pass")

    assert (parts.call("--part", "kernels"), parts.call("--part", "speed")) == (1, 0)

    assert "fail  kernels" in capsys.readouterr().out
    assert parts.saved()["measured on"]["device"] == "NVIDIA H200"
    assert parts.rows() == [("kernels", "fail", ""), ("speed", "pass", "")]
    assert parts.saved()["details"] == {"kernels": {"n": 1}, "speed": {"n": 1}}
    # A part that runs again is replaced.
    parts.end("kernels", "pass")
    assert parts.call("--part", "kernels") == 0
    assert sorted(parts.rows()) == [("kernels", "pass", ""), ("speed", "pass", "")]


def test_a_part_that_breaks_is_a_row_and_the_others_run(parts: Parts) -> None:
    parts.end("kernels", "breaks")
    parts.end("big", "pass")

    assert parts.call("--part", "kernels,big") == 1
    assert parts.rows() == [("kernels", "fail", "KeyError: 'compress, torch'"), ("big", "pass", "")]


# -- what parts make of what they start -----------------------------------------------------


def test_kernels_are_judged_by_the_copy_and_by_torch(check: ModuleType) -> None:
    def timed(ms: float, share: float) -> dict[str, list[float]]:
        return {"ms": [ms] * 3, "share of copy bandwidth": [share] * 3}

    shares = {
        "measured on": {"machine": "x"},
        "copy": timed(1, 1),
        "compress, int32": timed(2, 0.79),
        "AdamW, int32, master fp32": timed(3, 0.8),
        "compress, torch": timed(8, 0.2),
        "AdamW, torch": timed(2.9, 0.9),
    }

    assert said(check.bandwidths("kernels", shares)) == [
        ("compress, int32, of the copy's bandwidth", "fail"),
        ("AdamW, int32, master fp32, of the copy's bandwidth", "pass"),
        ("compress, int32, against torch", "pass"),
        ("AdamW, int32, master fp32, against torch", "fail"),
    ]
