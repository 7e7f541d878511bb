"""It fails well: one line for whoever started the job, the right exit code, and no hang."""

from __future__ import annotations

import itertools
import json
import re
import socket
import sys
import time
from pathlib import Path

import pytest
from support.exhaustive import by_default
from support.mpirun import TESTS, Finished, run_mpirun
from support.warm_python import warm_python

TRAIN = ("-m", "axsparse.train")
TINY = """\
model: {num_layers: 2, hidden_size: 16, num_heads: 2, sequence_length: 16}
batch: {global_batch_size: 8, microbatch_size: 2}
train: {steps: 1, eval_steps: 0, peak_flops: 1.0e9}
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    return path


def train(ranks: int, config: Path, *arguments: str) -> Finished:
    command = [*TRAIN, "--config", str(config), *arguments]
    return run_mpirun(ranks, command, cwd=config.parent)


# --- what the configuration, the command line and the data can get wrong -----------------


@pytest.mark.parametrize(
    ("ranks", "settings", "code", "line"),
    [
        pytest.param(
            *(2, "trian.steps=3", 78),
            "trian.steps (--set): unknown key; did you mean train.steps?",
            marks=pytest.mark.fault(11),
        ),
        pytest.param(
            *(3, "layout.g_inter=2 layout.g_data=2", 78),
            "layout: 3 ranks ≠ g_inter 2 × g_data 2; start 4 ranks or set layout.g_inter to one of "
            "1, 3 and layout.g_data to auto",
            marks=pytest.mark.fault(12),
        ),
        pytest.param(
            # With g_inter auto it would find that the activations fit nowhere.
            *(2, "batch.global_batch_size=9999999 batch.microbatch_size=9999999 layout.g_inter=2"),
            65,
            "stdlib train: N samples cannot fill a step of batch.global_batch_size (--set) "
            "9999999; take more data, or a smaller batch",
            marks=pytest.mark.fault(19),
        ),
    ],
)
def test_what_cannot_be_run_is_refused_once(
    tiny: Path, ranks: int, settings: str, code: int, line: str
) -> None:
    options = [option for pair in settings.split() for option in ("--set", pair)]

    said = re.sub(r"\d+ samples", "N samples", train(ranks, tiny, *options).error(code))

    assert said == line


# --- ranks that differ -------------------------------------------------------------------


def test_a_rank_of_another_configuration_is_named(tiny: Path) -> None:
    one = [*TRAIN, "--config", str(tiny)]

    job = run_mpirun(1, [*one, ":", "-n", "1", warm_python(), *one, "--set", "seed=2"])

    assert job.error(78) == (
        f"seed: rank 1 on host {socket.gethostname()} has 2, rank 0 has 1234; "
        "start all ranks with the same command, configuration and environment"
    )


# --- ranks that fail in the middle of a step ---------------------------------------------


def break_down(tmp_path: Path, grid: str, ranks: int, fault: str) -> tuple[Finished, float]:
    """Fail on rank 1 in step 2; the job, and how many seconds it outlived the failure."""
    program = str(TESTS / "faults" / "breaking.py")
    job = run_mpirun(ranks, [program, str(tmp_path), grid, "10", f"{fault}:2"])
    return job, time.monotonic() - float((tmp_path / "moment").read_text())


@pytest.mark.fault(16)
@pytest.mark.launcher
def test_an_exception_on_one_rank_ends_all_with_one_line(tmp_path: Path) -> None:
    job, outlived = break_down(tmp_path, "2x2", 4, "raise")

    kept = tmp_path / "traceback-rank-1.txt"
    assert job.error(70) == (
        "rank 1 (stage 1, replica 0): layer hidden2: RuntimeError: a layer of glass broke; "
        f"traceback in {kept}"
    )
    assert "in break_down\n" in kept.read_text()
    assert outlived < 2, str(job)


CALLS_ALONE = """
import sys, threading
import axsparse as ax
from support.runs import mlp, tiny_config, vector_data

quiet, call = sys.argv[1] == "quiet", sys.argv[2]
where = {} if quiet else {"run_dir": "run"}
# Until the first step is done, the watchdog waits five times as long.
timeout = 0.5 if call == "evaluate" else 2.0
config = tiny_config(watchdog={"timeout": timeout}, train={"eval_steps": 1})
trainer = ax.Trainer(mlp(), (vector_data(), vector_data()), config, quiet=quiet, **where)
trainer.evaluate()
if call == "step":
    trainer.step()
if trainer.rank == 0:
    getattr(trainer, call)()
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("where", "call"),
    by_default([("quiet", "evaluate")], itertools.product(["quiet", "run"], ["evaluate", "step"])),
)
def test_a_call_that_one_rank_makes_alone_ends_the_job(
    where: str, call: str, tmp_path: Path
) -> None:
    job = run_mpirun(2, ["-c", CALLS_ALONE, where, call], cwd=tmp_path, timeout=60)

    assert job.returncode == 70, str(job)
    (line,) = job.errors
    assert "hangs" in line, str(job)
    assert ("are above; a larger" in line) == (where == "quiet")
    assert (tmp_path / "run").exists() == (where == "run")


ENDS = """
import atexit, os, sys, threading
from os import _exit
import axsparse as ax
from support.runs import mlp, tiny_config, vector_data

ranks, where, who, code = int(sys.argv[1]), *sys.argv[2:]

def act():
    if who == "all" or trainer.rank == int(who):
        exec(code, globals())

def on_step(step, result):
    if where == "callback" and step == 2:
        act()

data = vector_data(), vector_data()
config = tiny_config(train={"steps": 6, "eval_steps": 1})
# What all ranks do is done in a run that listens to signals.
place = {"run_dir": "run"} if who == "all" else {"quiet": True}
if where == "exit":
    atexit.register(act)
trainer = ax.Trainer(mlp(), data, config, g_inter=ranks, **place)
if where == "before":
    act()
if where == "loop":
    for step in trainer:
        trainer.step()
        if step == 2:
            act()
else:
    trainer.train(on_step)
if where == "after":
    act()
print("end", flush=True)
"""


def left(rank: int, how: str) -> tuple[int, str]:
    return 70, f"rank {rank} (stage {rank}, replica 0): left in the middle of the run ({how})"


def apart(other: str, first: str) -> tuple[int, str]:
    return 78, (
        f"rank 1 {other}, and rank 0 {first}; make the same trainers on all ranks, and the same "
        "calls of them in the same order (`if trainer.rank == 0` is for what no other rank does)"
    )


def within(call: str) -> tuple[int, str]:
    return 78, (
        f"rank 1 (stage 1, replica 0): {call}: called within on_step of this trainer, which would "
        "go on afterwards; call it when on_step has returned (a callback ends the run by returning "
        "True)"
    )


FINE = 0, ""
CALLS = "calls close() after step 2", "calls step() after step 2"
MODEL = "calls model() after step {}"
ABORT = "from mpi4py import MPI; MPI.COMM_WORLD.Abort({})"
IN_A_THREAD = """
threading.Thread(target=os._exit, args=[0]).start()
threading.Event().wait()
"""
IN_A_DAEMON = """
began = threading.Event()
def wait(step, result):
    began.set()
    threading.Event().wait()
threading.Thread(target=trainer.train, args=[wait], daemon=True).start()
began.wait()
sys.exit()
"""
FAILS_IN_A_THREAD = """
def fail(step, result):
    raise ValueError("bad")
thread = threading.Thread(target=trainer.train, args=[fail])
thread.start()
thread.join()
"""
SKIPPED = """
try:
    trainer.train(lambda *_: 1 / 0)
except ZeroDivisionError:
    pass
"""
HANDLING = """
try:
    1 / 0
except ZeroDivisionError:
    trainer.step()
    trainer.close()
assert (trainer.run_dir / "checkpoints" / "step-3").exists()
"""


FORKED = """
child = os.fork()
if child:
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code == {}, code
else:
    trainer._saver.close = lambda: os._exit(9)  # waits for a thread that no fork has
    {}
"""
OF_A_MODULE = """
from torch import nn
module = nn.Sequential(nn.Linear(16, 5))
ax.Trainer(module, lambda: sys.exit(0), loss=nn.MSELoss(reduction="sum"), quiet=True)
"""


OTHER_TRAINS = left(0, "the main thread has ended, and another one trains; join it")
FAILED = "rank 0 (stage 0, replica 0): on_step after step 1: ValueError: bad"
GO_ON = ", with resume='auto' to go on"
LARGER = ", with resume='auto' and a larger train.steps to go on"
CLOSED = "rank 0 (stage 0, replica 0): {}: the trainer is closed; make another one"
ENDED = (
    "rank 0 (stage 0, replica 0): the loop: the trainer is closed since ZeroDivisionError has "
    f"ended it; make another one{GO_ON}"
)
KEPT = (
    "interrupted; run/checkpoints/step-2 is kept, and --resume auto (in Python "
    'resume="auto") goes on'
)
OVER = "model: the job has ended; call it before the program's exit"


WAYS_OUT = [
    ("callback", "1", "os._exit(0)", left(1, "os._exit(0)")),
    ("callback", "1", "_exit(0)", left(1, "os._exit(0)")),
    ("callback", "1", "sys.exit(5)", (5, left(1, "sys.exit(5)")[1])),
    ("callback", "0", "os.execl('/bin/true', 'true')", left(0, "os.execv('/bin/true')")),
    ("callback", "1", "os.abort()", left(1, "os.abort()")),
    ("callback", "1", "import ctypes; ctypes.CDLL(None).exit(0)", left(1, "C's exit()")),
    ("callback", "1", ABORT.format(""), left(1, "MPI's Abort(0)")),
    ("loop", "1", ABORT.format("errorcode=5"), (5, left(1, "MPI's Abort(5)")[1])),
    ("before", "0", ABORT.format(3), (3, "")),
    ("after", "0", ABORT.format(3), (3, "")),
    ("callback", "1", "raise KeyboardInterrupt", (130, "interrupted; nothing was saved")),
    ("callback", "all", "trainer.save()\nif trainer.rank: raise KeyboardInterrupt", (130, KEPT)),
    ("callback", "1", IN_A_THREAD, left(1, "os._exit(0)")),
    (
        "callback",
        "0",
        "trainer.save_hf('x')",
        apart("returns from on_step", "calls save_hf() after step 2"),
    ),
    ("loop", "1", "sys.exit(0)", apart("has ended", "calls step() after step 2")),
    ("loop", "1", "trainer.close()", apart(*CALLS)),
    ("loop", "all", SKIPPED, (78, ENDED)),
    ("loop", "all", HANDLING, FINE),
    ("before", "all", "trainer.close(); trainer.step()", (78, CLOSED.format("step") + GO_ON)),
    ("after", "all", "trainer.close(); trainer.train()", (78, CLOSED.format("train") + LARGER)),
    ("before", "all", IN_A_DAEMON, OTHER_TRAINS),
    ("before", "1", "os._exit(0)", apart("has ended", "calls train() after step 0")),
    ("after", "1", "os._exit(0)", FINE),
    ("after", "0", "trainer.model()", apart("has ended", MODEL.format(6))),
    ("callback", "0", "trainer.model()", apart("returns from on_step", MODEL.format(2))),
    ("exit", "0", "trainer.model()", (78, OVER)),
    ("callback", "1", "trainer.train()", within("train")),
    ("callback", "1", "trainer.close()", within("close")),
    ("callback", "all", "trainer.evaluate(); trainer.save(); trainer.model()", FINE),
    ("before", "all", OF_A_MODULE, left(0, "sys.exit(0)")),
]
OF_ONE_RANK = [
    *(("callback", "0", f"os.{way}", left(0, f"os.{way}")) for way in ("_exit(0)", "abort()")),
    ("callback", "0", "sys.exit(0)", left(0, "sys.exit(0)")),
    ("callback", "0", "os.execl('/bin/true', 'true')", left(0, "os.execv('/bin/true')")),
    ("callback", "0", ABORT.format(""), left(0, "MPI's Abort(0)")),
    ("callback", "0", IN_A_THREAD, left(0, "os._exit(0)")),
    ("before", "0", IN_A_DAEMON, OTHER_TRAINS),
    ("before", "0", FAILS_IN_A_THREAD, (70, FAILED)),
    ("before", "0", "trainer.close(); trainer.step()", (78, CLOSED.format("step"))),
]


@pytest.mark.parametrize(
    ("ranks", "where", "who", "code", "end"),
    by_default(
        [(2, *row) for row in WAYS_OUT[::6]] + [(1, *OF_ONE_RANK[0])],
        [(2, *row) for row in WAYS_OUT] + [(1, *row) for row in OF_ONE_RANK],
    ),
)
def test_what_is_over_is_over_and_every_way_out_is_clean(
    ranks: int, where: str, who: str, code: str, end: tuple[int, str], tmp_path: Path
) -> None:
    job = run_mpirun(ranks, ["-c", ENDS, str(ranks), where, who, code], cwd=tmp_path, timeout=100)

    returncode, line = end
    assert job.returncode == returncode, str(job)
    assert job.errors == [f"axsparse: error: {line}"] * bool(line), str(job)
    if not (returncode or line):
        assert job.stdout.count("end\n") == (1 if where == "after" else 2), str(job)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "where", "code", "way"),
    [
        (1, "callback", 0, "sys.exit(0)"),
        (2, "callback", 0, "sys.exit(0)"),
        (2, "callback", 1, "pass"),
        (1, "loop", 1, "trainer.step()"),
        (1, "loop", 3, "trainer.close(); sys.exit(3)"),
    ],
)
def test_a_fork_of_a_rank_ends_by_itself_and_changes_nothing(
    ranks: int, where: str, code: int, way: str, tmp_path: Path
) -> None:
    act = FORKED.format(code, way)
    command = ["-c", ENDS, str(ranks), where, "all", act]
    # A process that starts as a fork ends MPI by itself.
    job = run_mpirun(ranks, command, cwd=tmp_path, timeout=100, python=sys.executable)

    assert (job.returncode, job.errors) == (0, []), str(job)
    assert job.stdout.count("end\n") == ranks, str(job)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if "loss" in record]
    assert steps == [1, 2, 3, 4, 5, 6]


@pytest.mark.fault(18)
@pytest.mark.launcher
def test_a_killed_rank_ends_all(tmp_path: Path) -> None:
    job, outlived = break_down(tmp_path, "1x3", 3, "kill")

    assert job.returncode > 0, str(job)
    assert outlived < 5, str(job)
