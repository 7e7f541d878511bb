"""`ax.Trainer` in a plain program: its loop is `train`, and its ranks end together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.exhaustive import by_default
from support.hf import write_llama
from support.mpirun import Finished, run_alone, run_mpirun

import axsparse as ax

IMPORTS = """
import ctypes, dataclasses, os, signal, sys, threading
import axsparse as ax
from support.runs import mlp, vector_data

def made(run_dir="run", **how):
    how = {"global_batch_size": 12, "eval_steps": 0, **how}
    return ax.Trainer(mlp(), (vector_data(), vector_data()), run_dir=run_dir, **how)
"""
PROGRAM = """
def fail():
    raise ValueError("a mistake of the user's")

how, run_dir, *rest = sys.argv[1:]
own_hook = lambda kind, *_: print("own hook:", kind.__name__, flush=True)
if "hook" in rest:
    sys.excepthook = own_hook
    threading.excepthook = lambda args: own_hook(args.exc_type)
settings = {
    "pruning": {"method": "gradual", "sparsity": 0.8, "interval": 1, "until_step": 6},
    "batch": {"global_batch_size": 12, "microbatch_size": 3},
    "train": {"steps": 8, "eval_every": 3, "eval_steps": 2, "peak_flops": 1e9},
    "checkpoint": {"every": 3, "keep_last": 9},
    "train.compare_replicas_every": 1,
    "schedule.warmup_steps": 3,
    "run_dir": run_dir,
}
trainer = ax.Trainer(
    mlp(), (vector_data(), vector_data()), settings, precision="fp32", learning_rate=1e-2,
    resume="auto" if "resume" in rest else None, g_inter=2 if "stages" in rest else 1,
)
if "late-hook" in rest:
    sys.excepthook = own_hook
if how == "train":
    trainer.train()
elif how in ("steps", "left"):
    while trainer.steps_done < trainer.config.train.steps:
        trainer.step()
    if how == "steps":
        trainer.close()
else:
    for step in trainer:
        result = trainer.step()
        assert step == trainer.steps_done
        is_last = trainer.rank == trainer.coords.grid.size - 1
        if step == 5 and how == "raise" and is_last:
            fail()
        if step == 5 and how == "thread" and is_last:
            thread = threading.Thread(target=fail)
            thread.start()
            thread.join()
        if step == 5 and how == "signal" and trainer.rank == 0:
            trainer._stop.receive(signal.SIGUSR1)
        if step == 5 and how in ("break", "close", "exit", "interrupt", "late-signal"):
            if how == "close":
                trainer.close()
            elif how == "exit":
                sys.exit(3)
            break
    if how in ("interrupt", "late-signal") and trainer.rank == 0:
        os.kill(os.getpid(), signal.SIGINT if how == "interrupt" else signal.SIGTERM)
        print("not interrupted")
"""


def ended(folder: Path, program: str, *words: str, ranks: int = 1) -> Finished:
    """A program behind `IMPORTS`."""
    words = ("-c", IMPORTS + program, *words)
    return run_alone(words, cwd=folder) if ranks == 1 else run_mpirun(ranks, words, cwd=folder)


def left(folder: Path) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The records of a run but for its times and memory, and all tensors of its checkpoints."""
    differ = ("time", "second", "memory", "flops", "bubble", "phases", "_per_", "mfu")
    records = [
        {key: value for key, value in record.items() if not any(word in key for word in differ)}
        for record in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    ]
    steps = (folder / "checkpoints").glob("step-*")
    return records, {path.name: ax.load(path) for path in sorted(steps)}


def test_a_run_stays_where_it_was_made_though_the_program_goes_elsewhere(tmp_path: Path) -> None:
    """Also where a run of the same name is; skipped steps and tracebacks belong to the first."""
    program = """
os.chdir("other")
made(steps=5).train()
os.chdir("..")
made(steps=5).train()
second = made(steps=2, overwrite=True)
os.chdir("other")
second.train()
assert second._step.run_dir.folder == second.run_dir and second.run_dir.is_dir()
for step in made("third", steps=3):
    os.chdir("..")
    raise ValueError("a mistake of the user's")
"""
    (tmp_path / "other").mkdir()

    done = ended(tmp_path, program)

    assert done.errors == [
        "axsparse: error: rank 0 (stage 0, replica 0): ValueError: a mistake of the user's; "
        "traceback in third/traceback-rank-0.txt"
    ]
    for folder, steps in ((tmp_path, 2), (tmp_path / "other", 5)):
        records, checkpoints = left(folder / "run")
        assert max(record["step"] for record in records) == steps
        assert [*checkpoints] == [f"step-{steps}"]
    assert (tmp_path / "other" / "third" / "traceback-rank-0.txt").exists()


def same(ours: Path, reference: Path, *, steps: set[str]) -> None:
    records, checkpoints = left(ours)
    expected, saved = left(reference)
    assert records == expected
    assert checkpoints.keys() == steps
    for name in steps & saved.keys():
        assert all(value.equal(saved[name][key]) for key, value in checkpoints[name].items())


@pytest.mark.parametrize(
    ("ranks", "how", "ends"),
    by_default(
        [(1, (), ("exit", "interrupt"))],
        [
            *((1, (), ends) for ends in (("exit", "signal", "interrupt"), ("close", "break"))),
            *((2, how, ("close", "break", "exit", "signal")) for how in ((), ("stages",))),
            *((ranks, (), ("interrupt", "late-signal")) for ranks in (1, 2)),
        ],
    ),
)
def test_the_loop_is_train_bit_for_bit_and_goes_on_wherever_it_is_left(
    ranks: int, how: tuple[str, ...], ends: tuple[str, ...], tmp_path: Path
) -> None:
    """With masks that change, evaluations and checkpoints in the middle."""

    def run(name: str, run_dir: str, *more: str) -> Finished:
        return ended(tmp_path, PROGRAM, name, run_dir, *how, *more, ranks=ranks)

    assert run("train", "train").returncode == 0
    records, saved = left(tmp_path / "train")
    assert sum("eval_loss" in record for record in records) == 3
    assert sum("sparsity" in record for record in records) > 3
    every = {"step-3", "step-6", "step-8"}
    assert saved.keys() == every

    for name in ("loop", "steps", "left"):
        assert run(name, name).returncode == 0
        same(tmp_path / name, tmp_path / "train", steps=every)

    for name in ends:
        code = {"exit": 3, "signal": 75, "interrupt": 75, "late-signal": 75}.get(name, 0)
        first = run(name, name)
        assert first.returncode == code, first
        if name == "interrupt":  # other ranks may be within a call
            assert ("not interrupted" in first.stdout) == (ranks == 2)
        after = 6 if name == "signal" else 5
        assert f"after step {after}, saved in {name}/checkpoints" in first.stdout + first.stderr
        second = run("loop", name, "resume")
        assert f"after step {after}" in second.stdout, second
        same(tmp_path / name, tmp_path / "train", steps=every | {f"step-{after}"})


@pytest.mark.parametrize("ranks", by_default([1], [1, 2]))
@pytest.mark.parametrize("when", ["within", "later", "over"])
def test_a_program_that_only_evaluates_is_stopped_by_one_signal(
    ranks: int, when: str, tmp_path: Path
) -> None:
    program = """
def top1(logits, targets):
    if sys.argv[1] != "later" and trainer.rank == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    return ax.count_top1(logits, targets)

given = dataclasses.replace(mlp(), metrics={"top1": top1}), (vector_data(), vector_data())
how = dict(global_batch_size=12, steps=2, run_dir="run")
if sys.argv[1] == "over":
    ax.Trainer(*given, eval_steps=0, **how).train()
trainer = ax.Trainer(*given, eval_steps=1, resume="auto", **how)
trainer.evaluate()
print("evaluated", flush=True)
if sys.argv[1] == "later" and trainer.rank == 0:
    os.kill(os.getpid(), signal.SIGTERM)
"""
    done = ended(tmp_path, program, when, ranks=ranks)

    assert done.returncode == 75, done
    assert done.errors == []
    assert ("evaluated" in done.stdout) == (when == "later")
    said = (
        "saved in run/checkpoints; " if when == "over" else "with nothing to save; start it again"
    )
    assert (done.stdout + done.stderr).count(said) == 1


def test_a_signal_while_another_trainer_evaluates_saves_the_run_in_progress(tmp_path: Path) -> None:
    program = """
trained, other = made("trained", steps=9), made("other", eval_steps=1)
for number, _ in enumerate(trained, 1):
    trained.step()
    if number == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    other.evaluate()
"""
    done = ended(tmp_path, program)

    assert done.returncode == 75, done
    assert "stopped after step" in done.stdout + done.stderr
    assert [*(tmp_path / "trained" / "checkpoints").glob("step-*")]


@pytest.mark.parametrize("when", ["within", "stopped", "after"])
def test_a_signal_of_a_run_that_is_over_stops_the_run_in_progress(
    when: str, tmp_path: Path
) -> None:
    program = """
sent = []

def stop(*_):
    if not sent:
        sent.append(os.kill(os.getpid(), signal.SIGTERM))

trained = made("trained", steps=9)
trained.step()
try:
    steps = 9 if sys.argv[1] == "stopped" else 1
    made("other", steps=steps).train(None if sys.argv[1] == "after" else stop)
except ax.StoppedError as reason:
    print(reason)
if sys.argv[1] == "after":
    stop()
for _ in trained:
    trained.step()
"""
    done = ended(tmp_path, program, when)

    assert done.returncode == 75, done
    assert [*(tmp_path / "trained" / "checkpoints").glob("step-*")]


def test_a_signal_in_the_last_step_of_a_run_stops_the_next_one_alone(tmp_path: Path) -> None:
    program = """
def stop(*_):
    os.kill(os.getpid(), signal.SIGTERM)

made("first", steps=1).train(stop)
try:
    made("second", steps=1).train()
except ax.StoppedError as reason:
    print(reason)
made("third", steps=1).train(stop)
"""
    done = ended(tmp_path, program)

    assert done.returncode == 0, done
    assert done.stdout.count("stopped before the first step") == 1
    assert (tmp_path / "third" / "checkpoints" / "step-1").is_dir()


@pytest.mark.parametrize(
    ("how", "hook"),
    by_default(
        [("raise", "hook"), ("thread", "hook")],
        [*(("raise", hook) for hook in ("no", "hook", "late-hook")), ("thread", "hook")],
    ),
)
def test_an_exception_in_the_loop_of_one_rank_or_in_its_thread_ends_all_with_one_line(
    how: str, hook: str, tmp_path: Path
) -> None:
    """After the program's own `sys.excepthook` or `threading.excepthook`."""
    done = ended(tmp_path, PROGRAM, how, "run", "stages", hook, ranks=2)

    assert done.returncode == 70, done
    assert done.stdout.count("own hook: ValueError") == ("hook" in hook)
    assert done.errors == [
        "axsparse: error: rank 1 (stage 1, replica 0): ValueError: a mistake of the user's; "
        "traceback in run/traceback-rank-1.txt"
    ]
    assert "in fail" in (tmp_path / "run" / "traceback-rank-1.txt").read_text()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_error_before_the_first_trainer_is_one_line_as_a_later_one(
    ranks: int, tmp_path: Path
) -> None:
    program = """
import torch
try:
    ax.configure({"train.stepz": 3})
except ax.ConfigError as error:
    print("caught", error, flush=True)
mine = ax.ArrayDataset(torch.ones(4, 2), torch.ones(4))
if os.environ.get("PMI_RANK", "0") == sys.argv[1]:
    ax.ArrayDataset(torch.ones(3, 2), torch.ones(4))
ax.Trainer(mlp(), vector_data(), steps=3, eval_steps=0, global_batch_size=12).train()
"""
    done = ended(tmp_path, program, f"{ranks - 1}", ranks=ranks)

    assert (done.returncode, done.stdout.count("caught")) == (65, ranks), done
    (line,) = done.errors
    assert line.startswith(f"axsparse: error: rank {ranks - 1}: dataset (arrays): inputs"), done


def test_a_run_whose_last_evaluation_is_not_finite_ends_likewise_when_it_is_started_again(
    tmp_path: Path,
) -> None:
    program = """
import torch
bad = ax.ArrayDataset(torch.full((30, 16), torch.nan), torch.zeros(30, dtype=torch.long))
ax.Trainer(
    mlp(), (vector_data(), bad), steps=2, eval_steps=1, global_batch_size=12, run_dir="run",
    resume="auto",
).train()
"""
    for _ in range(2):
        done = ended(tmp_path, program)
        assert done.returncode == 70, done
        assert "step 2: the validation loss is nan; lower" in done.stderr
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert sum("eval_loss" in record for record in records) == 1


@pytest.mark.parametrize(("when", "code"), [("begun", 70), ("closed", 0)])
def test_an_exception_in_a_thread_of_the_program_ends_a_run_alone(
    when: str, code: int, tmp_path: Path
) -> None:
    """Once the trainer is closed it ends its thread, as in a program without one."""
    program = """
threading.excepthook = lambda args: print("own hook:", args.exc_value, flush=True)
trainer = ax.Trainer(mlp(), vector_data(), steps=3, eval_steps=0, global_batch_size=12)
trainer.step()
if sys.argv[1] == "closed":
    trainer.close()
thread = threading.Thread(target=[].pop)
thread.start()
thread.join()
print("goes on", flush=True)
"""
    done = ended(tmp_path, program, when)

    assert done.returncode == code, done
    assert "own hook: pop from empty list" in done.stdout
    assert ("goes on" in done.stdout) == (code == 0) == (not done.errors), done


@pytest.mark.parametrize(("hook", "code"), [("none", 1), ("chained", 1), ("own", 0)])
def test_what_a_library_has_caught_and_prints_ends_nothing_and_what_leaves_the_program_does(
    hook: str, code: int, tmp_path: Path
) -> None:
    program = """
trainer = ax.Trainer(mlp(), vector_data(), steps=3, eval_steps=0, global_batch_size=12)
if sys.argv[1] == "chained":
    before = sys.excepthook
    def chained(kind, failure, trace):
        print("heard", kind.__name__, flush=True)
        before(kind, failure, trace)
    sys.excepthook = chained
elif sys.argv[1] == "own":
    sys.excepthook = sys.__excepthook__
for step in trainer:
    trainer.step()
    ctypes.pythonapi.PyRun_SimpleString(b"raise ValueError('caught')")
    ctypes.pythonapi.PyRun_SimpleString(b"1 +")
print("trained", trainer.steps_done, flush=True)
if sys.argv[1] != "own":
    raise RuntimeError("left")
"""
    done = ended(tmp_path, program, hook)

    assert done.returncode == code, done
    assert "trained 3" in done.stdout, done
    assert done.stderr.count("ValueError: caught") == done.stderr.count("SyntaxError: ") == 3
    assert done.stderr.endswith("RuntimeError: left\n") == (code == 1)
    assert not done.errors
    assert done.stdout.count("heard RuntimeError") == (hook == "chained")


def test_errors_of_all_ranks_are_one_line_with_their_code(tmp_path: Path) -> None:
    done = ended(tmp_path, "ax.Trainer(sparsity=2)", ranks=2)

    assert done.error(78) == "pruning.sparsity (Trainer): 2 should be less than 1"


@pytest.mark.parametrize(("steps", "code"), [(2, 0), (1, 78)])
def test_a_program_may_end_mpi_by_itself_after_its_runs(
    steps: int, code: int, tmp_path: Path
) -> None:
    program = """
from mpi4py import MPI
trainer = made(steps=2, g_inter=2)
for step in trainer:
    trainer.step()
    if step == int(sys.argv[1]):
        break
if step == 2:
    trainer.close()
MPI.Finalize()
"""
    done = ended(tmp_path, program, str(steps), ranks=2)

    assert done.returncode == code, done
    assert len(done.errors) == (2 if code else 0)
    assert all("MPI.Finalize() was called in the middle" in line for line in done.errors)
    assert [one.name for one in tmp_path.glob("run/checkpoints/*")] == ["step-2"] * (not code)


def test_an_error_in_a_notebook_is_one_line_and_nothing_ends_the_process(tmp_path: Path) -> None:
    program = """
import sys
sys.ps1 = ">>> "
import signal, threading, torch
import axsparse as ax
from support.runs import mlp, vector_data

def trainer(**more):
    more |= {"global_batch_size": 12, "run_dir": "run"}
    return ax.Trainer(mlp(), vector_data(), steps=2, eval_steps=0, **more)

handler = signal.getsignal(signal.SIGINT)
first = trainer()
for step in first:
    first.step()
assert first.model() is not None and first.evaluate() is None
second = trainer(overwrite=True)
second.step()
assert signal.getsignal(signal.SIGINT) is handler
second.close()
for step in (third := trainer(overwrite=True)):
    assert signal.getsignal(signal.SIGINT) is not handler
    third.step()
    break
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
try:
    signal.raise_signal(signal.SIGINT)
    raise AssertionError("not interrupted")
except KeyboardInterrupt:
    third.train()
second.close()
assert signal.getsignal(signal.SIGINT) is handler

def cell(do):
    again = trainer(overwrite=True)
    for step in again:
        again.step()
        do()

left = []
for _ in range(2):
    try:
        cell(lambda: 1 / 0)
    except ZeroDivisionError as error:
        left.append(error)  # as a notebook keeps the last one, with its loop
refused = []
def take():
    try:
        trainer(overwrite=True)
    except ax.OutputError as error:
        refused.append(str(error))
def take_in_another_thread():
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
cell(take_in_another_thread)
assert len(refused) == 2 and "in use by a Trainer" in refused[0], refused
try:
    trainer()
except ax.OutputError as error:
    [line] = error._render_traceback_()
    print("told", line)
assert "mpi4py.MPI" not in sys.modules
"""
    done = run_alone(["-c", program], cwd=tmp_path)

    assert done.returncode == 0, done
    [line] = [line for line in done.stdout.splitlines() if line.startswith("told ")]
    assert line.startswith("told InUseError: run_dir (Trainer): run holds another run's records")


def test_a_saved_folder_has_the_files_of_its_source_though_the_program_goes_elsewhere(
    tmp_path: Path,
) -> None:
    program = """
from support.runs import token_data
trainer = ax.Trainer(
    ax.hf("llama"), token_data(), {"samo.enabled": False}, precision="fp32", quiet=True, steps=1,
    global_batch_size=4, microbatch_size=2,
)
os.chdir("other")
trainer.save_hf("saved")
"""
    for name in ("llama", "other"):
        (tmp_path / name).mkdir()
    write_llama(tmp_path / "llama")
    (tmp_path / "llama" / "LICENSE").write_text("mine")

    assert (done := ended(tmp_path, program)).returncode == 0, done

    assert (tmp_path / "other" / "saved" / "LICENSE").read_text() == "mine"


def test_a_saved_folder_is_the_export_of_the_checkpoint(tmp_path: Path) -> None:
    program = """
trainer = ax.Trainer(
    "gpt", None, {"model": {"num_layers": 2, "hidden_size": 32, "num_heads": 2,
    "sequence_length": 12}, "train.peak_flops": 1e9}, precision="fp32", sparsity=0.5, steps=2,
    g_inter=2, eval_steps=0, global_batch_size=4, microbatch_size=2, run_dir="run",
)
for _ in trainer:
    trainer.step()
trainer.save_hf("saved")
"""
    assert (done := ended(tmp_path, program, ranks=2)).returncode == 0, done

    ax.export(tmp_path / "run", "hf", tmp_path / "exported")

    files = sorted(path.name for path in (tmp_path / "exported").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "saved").iterdir())
    for name in files:
        ours, theirs = (tmp_path / folder / name for folder in ("saved", "exported"))
        assert ours.read_bytes() == theirs.read_bytes(), name
