"""The run directory or the data of a run are moved, removed or cut short while its ranks train."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.exhaustive import by_default
from support.mpirun import run_mpirun
from support.preparing import write_tokens

RUN = """
import json, os, shutil, sys
from pathlib import Path
import axsparse as ax
from support.runs import tiny_config, tiny_gpt
from axsparse.data.sources import open_datasets

ranks, every, code = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
config = tiny_config(
    batch={"global_batch_size": 4, "microbatch_size": 1},
    data={"source": "tokens", "path": "data"},
    checkpoint={"every": every},
    train={"steps": 4000},
)
run = Path("run")

def has_saved():
    return not every or json.loads((run / "run.json").read_text())["saved"]

def on_step(step, result):
    global code
    if trainer.rank == 0 and code and step >= 3 and has_saved():
        code, lose = "", code
        exec(lose)

datasets = open_datasets(config)
data = datasets.training, datasets.validation
trainer = ax.Trainer(tiny_gpt(config), data, config, g_inter=ranks, run_dir="run")
trainer.train(on_step)
print("end")
"""
LOST = "run is not the directory of this run any more: it was moved, removed or replaced while"
CUT = "data/train.tokens: has 20 bytes, and had 800 when it was opened; copy it again, and start"
HOW = {
    "moved": ("run.rename('elsewhere')", 74, LOST),
    "removed": ("run.rename('gone'); shutil.rmtree('gone', ignore_errors=True)", 74, LOST),
    "replaced": ("run.rename('elsewhere'); run.mkdir()", 74, LOST),
    "data cut short": ("os.truncate('data/train.tokens', 20)", 65, CUT),
}


@pytest.mark.parametrize(
    ("ranks", "how", "every"),
    by_default(
        [(2, "removed", 0)],
        [(ranks, how, every) for ranks in (1, 2) for how in HOW for every in (2, 0)],
    ),
)
def test_what_is_lost_while_a_run_trains_ends_it_in_one_line(
    ranks: int, how: str, every: int, tmp_path: Path
) -> None:
    """With checkpoints, and in a run that saves none."""
    code, returncode, line = HOW[how]
    write_tokens(tmp_path / "data", tokens=400, vocab=64)

    job = run_mpirun(ranks, ["-c", RUN, str(ranks), str(every), code], cwd=tmp_path, timeout=100)

    assert line in job.error(returncode), str(job)
    assert "end" not in job.stdout.split("\n") and "saved in" not in job.stdout, str(job)
    kept = tmp_path / ("run" if how == "data cut short" else "elsewhere")
    if every and how != "removed":
        assert [*(kept / "checkpoints").glob("step-*[0-9]")], str(job)
    assert kept.name == "run" or not (tmp_path / "run" / "metrics.jsonl").exists()
