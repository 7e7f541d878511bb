"""The notebook of examples/afternoon.py: it has the script's code, and its cells run in order."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.mpirun import ENVIRONMENT, LONGEST_SECONDS
from support.page_blocks import ROOT

EXAMPLES = ROOT / "examples"
NOTEBOOK = EXAMPLES / "afternoon.ipynb"
KERNEL = """
import json, sys, types

shows = types.SimpleNamespace(HTML=lambda text: print("shows", text[:20]))
sys.modules |= {"IPython": types.ModuleType("IPython"), "IPython.display": shows}
names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec("".join(cell["source"]), names)
    if "CHANGES" in names:
        names["CHANGES"] = ["train.steps=12", "pruning.at_step=4", "train.eval_every=4"]
"""
"""Runs the cells as a kernel does, with a short training."""


def test_the_notebook_is_made_of_the_script() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import afternoon_notebook as made; print(made.notebook(), end='')"],
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=True,
    )

    hint = "python scripts/afternoon_notebook.py makes it anew"
    assert NOTEBOOK.read_text(encoding="utf-8") == done.stdout, hint


@pytest.mark.exhaustive
def test_its_cells_run_in_order_and_end_with_the_accuracy_that_was_reported(
    tmp_path: Path,
) -> None:
    for name in ("afternoon.yaml", "digits.py", "digits.npz"):
        shutil.copy(EXAMPLES / name, tmp_path)

    done = subprocess.run(
        [sys.executable, "-c", KERNEL, NOTEBOOK],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    best = re.search(r"^accuracy of the best checkpoint (\S+)$", done.stdout, re.MULTILINE)
    assert best is not None
    assert re.search(r"^shows <div><iframe", done.stdout, re.MULTILINE)
    assert done.stdout.endswith(f"accuracy {best[1]}\n")
