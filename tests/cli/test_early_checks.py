"""Mistakes in a configuration are told before torch is loaded, once, whoever starts the ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support.mpirun import LONGEST_SECONDS, run_mpirun

LOADED = """
import sys
from axsparse.{module} import main
try:
    main({words})
finally:
    assert "torch" not in sys.modules and "mpi4py" not in sys.modules
"""
CALIBRATE = ("--out", "x.yaml")
UNKNOWN = "axsparse: error: trian.steps (--set): unknown key; did you mean train.steps?\n"
ALONE = (
    "axsparse: error: layout.g_inter (--set): 4 does not divide the 1 rank; start 4 ranks "
    "(mpirun -n 4 before the same command) or choose 1\n"
)
ODD = (
    "axsparse: error: model.num_heads (--set): 7 does not divide model.hidden_size 256; choose one "
    "of 1, 2, 4, 8, 16, 32, 64, 128\n"
)
CLUSTER = "axsparse: error: cluster 'summmit': no such file and no bundled cluster of that name; "


@pytest.mark.parametrize(
    ("module", "words", "line"),
    [
        ("train", ("--set", "trian.steps=3"), UNKNOWN),
        ("train", ("--set", "layout.g_inter=4"), ALONE),
        ("train", ("--set", "model.num_heads=7"), ODD),
        ("cli.calibrate", ("--set", "trian.steps=3", *CALIBRATE), UNKNOWN),
        ("cli.plan", ("--set", "model.num_heads=7", "--gpus", "4"), ODD),
        ("cli.plan", ("--gpus", "4", "--cluster", "summmit"), f"{CLUSTER}did you mean summit? "),
    ],
)
def test_a_mistake_is_told_before_torch_is_loaded(
    module: str, words: tuple[str, ...], line: str
) -> None:
    code = LOADED.format(module=module, words=["--config", "quickstart.yaml", *words])

    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )

    assert (done.returncode, done.stdout) == (66 if line.startswith(CLUSTER) else 78, "")
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1


def test_many_ranks_tell_it_once(tmp_path: Path) -> None:
    command = ["-m", "axsparse.train", "--config", "quickstart.yaml", "--set", "trian.steps=3"]

    done = run_mpirun(2, command, cwd=tmp_path)

    assert (done.returncode, done.stderr) == (78, UNKNOWN)
