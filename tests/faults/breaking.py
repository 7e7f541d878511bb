"""A training that something happens to: `python breaking.py RUN_DIR GRID STEPS FAULT [RESUME]`.

GRID is stages x replicas, such as 1x2. It saves every second step. FAULT is "none" or

    kill-write:STEP     rank 1 is killed while it writes a file of that step's checkpoint
    kill-commit:STEP    rank 0 is killed when all is written, before the checkpoint has its name
    kill-remove:STEP    rank 0 is killed while it removes the checkpoint of that step
    kill-step:STEP      rank 1 is killed after that step
    limit:STEP          files of rank 1 may have no more than 2 kB from that step on
    signal:STEP         the launcher gets SIGUSR1 after that step, from rank 0
    signal-save:STEP    the launcher gets SIGUSR1 while that step's checkpoint is written
    hold:STEP           rank 0 writes its process to RUN_DIR/../held after that step, and waits for
                        RUN_DIR/../go to be written
    nan:STEP            a gradient of rank 1 is NaN once, in the step after that one
    nans:STEP           a gradient of rank 1 is NaN in every step after that one
    stop-save:STEP      rank 0 is stopped (SIGSTOP) while it writes a file of that step's checkpoint
    data:STEP           rank 0 never ends reading the batch of that step
    slow:STEP           the first forward of rank 2 takes longer than `watchdog.timeout`, every
                        other some milliseconds more
    raise:STEP          rank 1 raises an exception in a forward of that step; likewise kill
                        (kill -9) and stop (SIGSTOP). RUN_DIR/moment has the monotonic time
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from support.runs import mlp, tiny_config, vector_data, with_layout
from support.warm_client import SESSION
from torch import Tensor

from axsparse.data.batches import Batches
from axsparse.data.dataset import Datasets
from axsparse.runtime.files import safetensors
from axsparse.runtime.files.safetensors import TensorHeader
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job, run
from axsparse.training import run_recorder
from axsparse.training.checkpoint import saver as save
from axsparse.training.trainer import Trainer, build

SMALLEST_BYTES = 2_000
TIMEOUT = 2.0
LONG_SECONDS, SLOW_SECONDS = 1.5 * TIMEOUT, 0.02
WATCHED = ("stop", "stop-save", "data", "slow")
"""Faults that the watchdog notices."""


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("that was the end")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def break_down() -> None:
    raise RuntimeError("a layer of glass\nbroke")


IN_FORWARD: dict[str, Callable[[], object]] = {"raise": break_down, "kill": die, "stop": stop}


def tell_launcher() -> None:
    # The tests start the launcher as the first process of a session.
    os.kill(int(os.environ.get(SESSION) or os.getsid(0)), signal.SIGUSR1)


def break_writing(step: int, happen: Callable[[], None]) -> None:
    """Something happens after the second piece of a file of a checkpoint."""
    write = safetensors.write_safetensors

    def breaking(
        path: Path,
        headers: Mapping[str, TensorHeader],
        tensors: Iterator[Tensor],
        *,
        written: Callable[[Any], object],
    ) -> None:
        pieces = 0

        def count(piece: Any) -> None:
            nonlocal pieces
            written(piece)
            pieces += 1
            if pieces == 2 and path.parent.name == f"step-{step}.tmp":
                happen()

        write(path, headers, tensors, written=count)

    vars(save)["write_safetensors"] = breaking


def never_end() -> None:
    threading.Event().wait()


def break_method(
    owner: type, name: str, breaks: Callable[..., bool], happen: Callable[[], object]
) -> None:
    """Something happens before the calls of a method with arguments for which it `breaks`."""
    method = getattr(owner, name)

    def breaking(*args: Any, **more: Any) -> Any:
        if breaks(*args):
            happen()
        return method(*args, **more)

    type.__setattr__(owner, name, breaking)


def break_forward(trainer: Trainer, kind: str, step: int, run_dir: Path) -> None:
    """Something happens in a forward of a step, once unless it is slowness."""
    has_begun = False

    def forward(*_: object) -> None:
        nonlocal has_begun
        if kind == "slow":
            time.sleep(SLOW_SECONDS if has_begun else LONG_SECONDS)
            has_begun = True
        elif trainer.steps_done == step - 1 and not has_begun:
            has_begun = True
            (run_dir / "moment").write_text(str(time.monotonic()))
            IN_FORWARD[kind]()

    for layer in trainer.layers:
        layer.module.register_forward_hook(forward)


def break_it(kind: str, step: int, rank: int, beside: Path) -> Callable[[int], None]:
    """Prepare the fault; what is returned is called after every step."""
    told = threading.Event()

    def tell_once() -> None:
        if not told.is_set():
            told.set()
            tell_launcher()

    def hold() -> None:
        beside.joinpath("held").write_text(str(os.getpid()))
        beside.joinpath("go").read_text()

    match kind, rank:
        case "kill-write", 1:
            break_writing(step, die)
        case "kill-commit", 0:
            break_method(Path, "rename", lambda path, _: path.name == f"step-{step}.tmp", die)
        case "kill-remove", 0:
            old = f"step-{step}.old"
            break_method(Path, "unlink", lambda path, *_: path.parent.name == old, die)
        case "signal-save", 0:
            break_writing(step, tell_once)
        case "stop-save", 0:
            break_writing(step, stop)
        case "data", 0:
            break_method(Batches, "training", lambda _, number: number == step - 1, never_end)

    size = (SMALLEST_BYTES, SMALLEST_BYTES)
    happens: dict[tuple[str, int], Callable[[], object]] = {
        ("kill-step", 1): die,
        ("limit", 1): lambda: resource.setrlimit(resource.RLIMIT_FSIZE, size),
        ("signal", 0): tell_launcher,
        ("hold", 0): hold,
    }

    def after(done: int) -> None:
        if done == step and (kind, rank) in happens:
            happens[kind, rank]()

    return after


def break_gradient(trainer: Trainer, spoilt: Callable[[int], bool]) -> None:
    """One entry that is kept of the third layer's weight is NaN, after `spoilt` steps."""
    layer = next(each for each in trainer.layers if each.spec.name == "hidden2")
    weight = next(each for each in layer.state.tensors if each.name == "hidden2.0.weight")

    def spoil(gradient: Tensor) -> Tensor:
        if not spoilt(trainer.steps_done):
            return gradient
        gradient = gradient.clone()
        gradient.view(-1)[weight.index.positions()[0]] = float("nan")
        return gradient

    weight.parameter.register_hook(spoil)


def digest(trainer: Trainer) -> str:
    found = hashlib.sha256()
    for layer in trainer.layers:
        for tensor in layer.state.tensors:
            found.update(tensor.parameter.detach().numpy().tobytes())
    return found.hexdigest()


def main(job: Job) -> None:
    run_dir, grid, steps, fault, *resume = sys.argv[1:]
    g_inter, g_data = (int(number) for number in grid.split("x"))
    kind, _, step = fault.partition(":")
    rank = job.transport.rank
    after = break_it(kind, int(step or 0), rank, Path(run_dir).parent)
    config = tiny_config(
        run_dir=run_dir,
        train={"steps": int(steps)},
        checkpoint={"every": 2, "keep_last": 2},
        pruning={"method": "gradual", "interval": 2, "until_step": 9},
        watchdog={"timeout": TIMEOUT, "slow_ratio": 2.0} if kind in WATCHED else {},
    )
    if kind == "slow":
        run_recorder.SLOW_STEPS = 4
    trainer = build(
        job,
        mlp(),
        lambda: Datasets(vector_data()),
        with_layout(config, Grid(g_inter, g_data)).with_origins("broken", {"run_dir": "--run-dir"}),
        resume=resume[0] if resume else None,
    )
    if (kind in IN_FORWARD and rank == 1) or (kind == "slow" and rank == 2):
        break_forward(trainer, kind, int(step), Path(run_dir))
    if kind in ("nan", "nans") and rank == 1:
        once = kind == "nan"
        break_gradient(trainer, lambda done: done == int(step) or (done > int(step) and not once))
    trainer.train(lambda done, _: after(done))
    if kind == "nan":
        Path(run_dir, f"weights-{rank}").write_text(digest(trainer))


if __name__ == "__main__":
    run(main)
