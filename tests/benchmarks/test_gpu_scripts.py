"""Scripts for GPUs before they have one: refusals, bounds, and their smallest runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_beside
import gpu_check
import gpu_kernels
import gpu_peers
import gpu_train
import pytest
import torch
from gpu_plan import Training
from gpu_report import Report, Row
from support.cuda_on_cpu import COMPRESS, HELPERS, JUDGE, STEP, EmulatedLauncher, compiler
from support.mpirun import LONGEST_SECONDS, TESTS

TINY = (
    *("model.num_layers=2", "model.hidden_size=32", "model.num_heads=2"),
    *("model.sequence_length=16", "batch.microbatch_size=2", "batch.global_batch_size=4"),
)
SEEN = {"missing": [], "device": "NVIDIA H200", "torch": "2.11", "MPI": "MPICH", "CuPy": "14"}


def test_without_a_gpu_every_script_says_so_and_ends_with_69(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path)}
    ended = subprocess.run(
        ["sh", str(TESTS.parent / "scripts" / "gpu_check.sh")],
        env={**os.environ, **own},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    assert ended.stdout == "gpu_check: no CUDA device is here; every part is skipped\n"
    assert ended.returncode == 69, ended.stderr
    assert not list(tmp_path.iterdir())

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_train.main(["2.7b"]) == 69
    with pytest.raises(SystemExit) as end:
        gpu_kernels.main(["--rounds", "3"])
    assert end.value.code == 69
    assert capsys.readouterr().out.count("no CUDA device is here") == 2


# -- gpu_check: parts, on a machine that is told of -----------------------------------------


def test_parts_that_fail_or_break_are_rows_and_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "environment", lambda _: ([], None))
    monkeypatch.setattr(gpu_check.Host, "look", lambda _: dict(SEEN))
    path = tmp_path / "found.json"

    def ends(part: str, outcome: Any) -> Callable[[object], Any]:
        def run(_: object) -> Any:
            if outcome == "breaks":
                raise KeyError("compress, torch")
            return [Row(part, "x", outcome)], {"n": 1}

        return run

    def call(**outcomes: str) -> int:
        for part, outcome in outcomes.items():
            monkeypatch.setitem(gpu_check.RUN, part, ends(part, outcome))
        code: int = gpu_check.main(["--part", ",".join(outcomes), "--save", str(path)])
        return code

    def rows() -> list[tuple[str, str, str]]:
        checks = json.loads(path.read_text())["checks"]
        told = [row for row in checks if row["check"] != "seconds"]
        return sorted((row["part"], row["outcome"], row["measured"]) for row in told)

    assert (call(kernels="fail"), call(speed="pass")) == (1, 0)
    assert rows() == [("kernels", "fail", ""), ("speed", "pass", "")]
    # A part that runs again is replaced, and one that breaks leaves the others alone.
    assert call(kernels="breaks", big="pass") == 1
    broken = ("kernels", "fail", "KeyError: 'compress, torch'")
    assert rows() == [("big", "pass", ""), broken, ("speed", "pass", "")]


# -- gpu_kernels and gpu_train --------------------------------------------------------------


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler (g++ or clang++)")
def test_every_kernel_that_is_timed_runs_and_has_a_bound(tmp_path: Path) -> None:
    wanted = [name for name in COMPRESS + STEP if "Bf16, Bf16" in name] + JUDGE + HELPERS
    mask = torch.rand(9000, generator=torch.Generator().manual_seed(1)) < 0.1

    made, moved = gpu_kernels.calls(EmulatedLauncher(wanted, tmp_path), mask, torch.device("cpu"))
    for call in made.values():
        call()

    assert made.keys() == moved.keys()
    assert len(made) == 1 + 3 * 3 + 2


@pytest.mark.exhaustive
def test_a_training_is_held_against_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    device = gpu_train.Device("none", 24_000_000_000, 1.0)
    here = gpu_train.RankCoords(device, tmp_path, time.monotonic() + 120.0)
    training = Training("quickstart.yaml", (*TINY, "precision=bf16"), 4)

    rows, detail = gpu_train.alone("tiny", gpu_train.pruned(training, here), here)

    assert {row.check: row.outcome for row in rows} == {
        "seconds a step": "info",
        "tokens a second": "info",
        gpu_train.PART_OF_PEAK: "pass",
        "every loss is a number": "pass",
        "live state has the planned bytes": "pass",
    }
    assert len(detail["step seconds"]) == 4
    assert detail["tokens a step"] == 4 * 16


# -- gpu_beside -----------------------------------------------------------------------------


def test_pages_have_the_table_of_the_results() -> None:
    root = TESTS.parent
    saved = json.loads((root / "benchmarks/results/gpu_check-nvidia-h200.json").read_text())
    for page, best in (("README.md", True), ("docs/howto/gpu.md", False)):
        table = "\n".join(gpu_beside.markdown(saved["details"]["beside"], "H200", best=best))
        assert table in (root / page).read_text(encoding="utf-8"), page


def test_a_dense_run_has_the_losses_of_its_peer_and_is_not_run_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = (
        *("model.num_layers=1", "model.hidden_size=32", "model.num_heads=2"),
        *("model.sequence_length=16", "model.vocab_size=256"),
    )
    small, dense = ("samo.enabled=false", "precision=fp32", *tiny), gpu_beside.DENSE
    monkeypatch.setattr(gpu_beside, "RUNS", (gpu_beside.Run(dense, (4,), small),))
    monkeypatch.setattr(gpu_beside, "WARM", 1)
    monkeypatch.setattr(gpu_beside, "STEPS", 2)
    device = gpu_train.Device("none", 24_000_000_000, 1.0)
    here = gpu_train.RankCoords(device, tmp_path, time.monotonic() + 120.0)
    report = Report.opened(tmp_path / "beside.json", {})

    rows = gpu_beside.measure(here, report)
    monkeypatch.setattr(gpu_beside, "ours", None)
    again = gpu_beside.measure(here, Report.opened(tmp_path / "beside.json", {}))

    assert [row.outcome for row in rows] == ["info"]
    assert again == rows
    losses = report.details["beside"][dense]["4"]["losses"]
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda *_, **__: None)
    saved = tmp_path / "peer.json"
    words = ("plain", "--microbatches", "4", "--batch", "16", "--warm", "0", "--steps", "3")
    assert gpu_peers.main([*words, "--save", str(saved), "--set", *tiny]) == 0
    theirs = json.loads(saved.read_text(encoding="utf-8"))["4"]["losses"]
    assert theirs == pytest.approx(losses, rel=2e-3)  # they multiply in bf16
    assert len({*losses}) == 3
