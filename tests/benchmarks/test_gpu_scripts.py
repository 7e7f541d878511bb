"""Scripts for GPUs before they have one, and the figures of the page on pruned models in use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gpu_beside
import gpu_kernels
import gpu_train
import pytest
import torch
from support.mpirun import LONGEST_SECONDS
from support.page_blocks import ROOT


def test_without_a_gpu_every_script_says_so_and_ends_with_69(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path)}
    ended = subprocess.run(
        ["sh", str(ROOT / "scripts" / "gpu_check.sh")],
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


# -- gpu_beside -----------------------------------------------------------------------------


def test_pages_have_the_table_of_the_results() -> None:
    saved = json.loads((ROOT / "benchmarks/results/gpu_check-nvidia-h200.json").read_text())
    for page, best in (("README.md", True), ("docs/howto/gpu.md", False)):
        table = "\n".join(gpu_beside.markdown(saved["details"]["beside"], "H200", best=best))
        assert table in (ROOT / page).read_text(encoding="utf-8"), page


def test_graphs_are_judged_by_the_losses_of_a_run_without_them() -> None:
    def checked(graphed: list[float]) -> list[tuple[str, str]]:
        losses = {gpu_beside.PRUNED: [10.0, 9.0], gpu_beside.GRAPHED: graphed}
        found = {n: {"4": {"seconds": [1.0], "peak": {}, "losses": losses[n]}} for n in losses}
        rows = gpu_beside.judged_rows("beside", found)
        return [(row.outcome, row.measured) for row in rows if "losses" in row.check]

    assert checked([10.001, 9.5]) == [("fail", "9.5000 at last, 9.0000 without")]
    assert checked([10.001, 9.001]) == [("pass", "9.0010 at last, 9.0000 without")]
    assert checked([10.0, float("nan")])[0][0] == "fail"
    assert checked([]) == []


def test_the_page_has_the_table_of_the_results() -> None:
    saved = json.loads((ROOT / "benchmarks/results/decode_avx512.json").read_text(encoding="utf-8"))
    lines = ["| one thread | ms a token | × bf16 | × fp32 | MB |", "|---|---|---|---|---|"]
    for model, contenders in saved["models"].items():
        for name, row in contenders.items():
            cells = [f"{row['ms a token']['median']:.1f}"]
            for other in ("bf16", "fp32"):
                speed = row.get(f"speed over {other}")
                cells.append(f"{speed['median']:.2f}" if speed else "–")
            lines.append(f"| {model}: {name} | {' | '.join(cells)} | {row['MB']:.0f} |")
    page = (ROOT / "docs/howto/use-pruned.md").read_text(encoding="utf-8")
    assert "\n".join(lines) in page, "\n".join(lines)
