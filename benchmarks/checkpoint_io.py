"""Checkpoints of a training run against torch.distributed.checkpoint (DCP), in turn in one job.

    mpirun -n 4 python benchmarks/checkpoint_io.py [--save benchmarks/results/checkpoint_io.json]
        [--machine "2 cores, 24 GiB, AMX"] [--folder DIR]

A GPT of 1 GB of saved state over as many pipeline stages as there are ranks, 90 % pruned (or
--sparsity 0: dense): masters, moments and masks. Every rank gives DCP the very tensors that our
files have; its process group is gloo on loopback, its writer FileSystemWriter as it comes,
which fsyncs each file. Ours hashes and reads back what it wrote besides.

Each saves in the background, and once more at once, as at the end of a run ("sync").

- blocked: what the call takes that begins a save, on the rank that it takes longest
- stall: what all steps until the save is there take beyond as many undisturbed ones, the call
  included; so it counts what writing takes from computing on the same cores
- committed: from the call until the checkpoint is there (its folder, or DCP's .metadata)
- load: into live state, from pages that the system still has, dense weights included: DCP brings
  masters and moments, and the function that ours uses expands them
- verify: all files by size and hash, a part on each rank; DCP has nothing of the kind

Medians over rounds; brackets hold the least and the most.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
from figures import host_machine
from mpi4py import MPI
from small_gpt import config_of, trainer_of
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from axsparse.runtime.mpi.mpi_transport import MpiTransport
from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS, path_of
from axsparse.training.checkpoint.layer_files import PIECE, contents_of, load_layers
from axsparse.training.checkpoint.verification import open_checkpoint, verify_together
from axsparse.training.trainer import Trainer

OURS, PEERS = ("axsparse", "axsparse sync"), ("dcp async", "dcp sync")
METHODS = (*OURS, *PEERS)
TOKENS, MICROBATCHES, HEADS = 16, 4, 16
POLL_SECONDS = 0.005


@dataclass
class Row:
    """What one method took, a value a round."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    """Until the save was there."""
    nbytes: int = 0
    """On the disk."""

    def add(self, what: str, seconds: float) -> None:
        self.seconds.setdefault(what, []).append(seconds)


class Bench:
    """A trainer, and the ways to save and load what it has."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.world = MPI.COMM_WORLD
        self.rank = self.world.Get_rank()
        self.folder = folder
        self.transport = MpiTransport(self.world)
        self.trainer = make_trainer(arguments, self.transport, folder / "run")
        self._masks: dict[str, Tensor] = {}
        self._sums: dict[str, int] = {}
        """Of the tensors that were saved last."""
        port = 0
        if self.rank == 0:
            with socket.socket() as found:
                found.bind(("127.0.0.1", 0))
                port = found.getsockname()[1]
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://127.0.0.1:{self.world.bcast(port)}",
            rank=self.rank,
            world_size=self.world.Get_size(),
        )
        self._number = 0
        self.undisturbed: list[float] = []
        """Steps of the rounds that count."""

    def state(self) -> dict[str, Tensor]:
        """What our files have of this rank's stage, live but for the masks."""
        trainer = self.trainer
        found = {}
        for number, layer in enumerate(trainer.parts.layers):
            contents = contents_of(number, layer, trainer.parts.survey.ties, None)
            for file in contents.files.values():
                for key, saved in file.items():
                    if saved.is_fixed and key not in self._masks:
                        self._masks[key] = saved.value()
                    found[key] = self._masks[key] if saved.is_fixed else saved.value()
        return found

    def _checksums(self) -> dict[str, int]:
        return {
            key: zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
            for key, tensor in self.state().items()
        }

    def step(self) -> float:
        """One step, and the time of the rank that took longest."""
        began = time.perf_counter()
        self.trainer.parts.phases.begin_step()
        self.trainer.step()
        self.trainer.parts.phases.end_step()
        return float(self.world.allreduce(time.perf_counter() - began, MPI.MAX))

    def save(self, method: str, row: Row, undisturbed: list[float]) -> Path:
        """Save once while training goes on."""
        saver = self.trainer._saver
        assert saver is not None
        ours = method in OURS
        path = self.folder / f"dcp-{self._number}"
        self._number += 1
        if ours:
            path = path_of(self.folder / "run" / CHECKPOINTS, self.trainer.steps_done)
        appeared = Appearance(path if ours else path / ".metadata")
        is_there: Callable[[], bool]
        self._sums = self._checksums()
        self.world.Barrier()
        began = time.perf_counter()
        if ours:
            saver.start(self.trainer._progress())
            if method == "axsparse sync":
                saver.finish()
            is_there = lambda: saver._pending is None  # noqa: E731
        elif method == "dcp async":
            future: Any = dcp_async_save(self.state(), checkpoint_id=path)
            is_there = future.done
        else:
            dcp_save(self.state(), checkpoint_id=path)
            is_there = lambda: True  # noqa: E731
        blocked = float(self.world.allreduce(time.perf_counter() - began, MPI.MAX))
        steps, extra = 0, blocked
        while not self.world.allreduce(is_there(), MPI.LAND):
            extra += self.step() - statistics.median(undisturbed)
            steps += 1
        if method == "dcp async":
            future.result()
        row.add("blocked", blocked)
        row.add("stall", extra)
        row.add("committed", self.world.bcast(appeared.wait() - began))
        row.steps.append(steps)
        row.nbytes = sum(one.stat().st_size for one in path.rglob("*"))
        return path

    def _expand(self) -> None:
        """Dense weights from the masters that are there."""
        for layer in self.trainer.parts.layers:
            for tensor in (one for one in layer.state.tensors if one.alias_of is None):
                for start in range(0, tensor.kept, PIECE):
                    stop = min(start + PIECE, tensor.kept)
                    values = layer.state.optimizer_state.read_master(tensor, start, stop)
                    layer.state.optimizer_state.write_master(tensor, start, values)

    def load(self, method: str, path: Path, row: Row) -> None:
        """Load what was saved into live state, which is then as it was when it was saved."""
        layers, ties = self.trainer.parts.layers, self.trainer.parts.survey.ties
        state = self.state()
        for key, tensor in state.items():
            if key not in self._masks:
                tensor.zero_()
        self.world.Barrier()
        began = time.perf_counter()
        if method in OURS:
            verify_together(self.transport, path)
            self.world.Barrier()
            row.add("verify", time.perf_counter() - began)
            began = time.perf_counter()
            load_layers(open_checkpoint(path), layers, ties)
        else:
            dcp_load(state, checkpoint_id=path)
            self._expand()
        self.world.Barrier()
        row.add("load", time.perf_counter() - began)
        assert self._checksums() == self._sums, "what was loaded is not what was saved"


class Appearance:
    """When a path appears, seen by a thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0.0
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def wait(self) -> float:
        self._thread.join()
        return self._at

    def _look(self) -> None:
        while not self._path.exists():
            time.sleep(POLL_SECONDS)
        self._at = time.perf_counter()


def make_trainer(arguments: argparse.Namespace, transport: MpiTransport, folder: Path) -> Trainer:
    """A trainer that saves when it is told to, one stage a rank."""
    config = config_of(
        arguments.layers,
        arguments.hidden,
        TOKENS,
        heads=HEADS,
        microbatches=MICROBATCHES,
        pruning={"sparsity": arguments.sparsity, "method": "random"},
        samo={"enabled": arguments.sparsity > 0},
        checkpoint={"every": 0, "keep_last": 1},
        run_dir=str(folder),
    )
    return trainer_of(config, transport=transport)


def spread(values: list[float]) -> list[float]:
    """Median, least and most."""
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def ratios(rows: dict[str, Row], mine: str, other: str) -> dict[str, list[float]]:
    """Ours over another's, within rounds."""
    ours, others = rows[mine].seconds, rows[other].seconds
    return {
        what: spread([a / b for a, b in zip(ours[what], others[what], strict=True)])
        for what in ("blocked", "stall", "committed", "load")
    }


def report(arguments: argparse.Namespace, bench: Bench, rows: dict[str, Row], rounds: int) -> None:
    """Say what is known after so many rounds, and put it into the file."""
    result = {
        "machine": {**host_machine(), "told": arguments.machine},
        "ranks": bench.world.Get_size(),
        "model": {key: getattr(arguments, key) for key in ("hidden", "layers", "sparsity")},
        "rounds": rounds,
        "undisturbed_step_seconds": spread(bench.undisturbed),
        "methods": {
            method: {
                "bytes": row.nbytes,
                "steps_until_committed": spread([float(steps) for steps in row.steps]),
                **{f"{what}_seconds": spread(values) for what, values in row.seconds.items()},
            }
            for method, row in rows.items()
        },
        "ours_over": {
            f"{mine} over {other}": ratios(rows, mine, other)
            for mine, other in zip(OURS, PEERS, strict=True)
        },
    }
    print(json.dumps(result, indent=1), flush=True)
    if arguments.save:
        arguments.save.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Measure on the ranks of this job; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--machine", default="")
    parser.add_argument("--folder", type=Path, help="on the disk that is measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="undisturbed, before each save")
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=15)
    parser.add_argument("--sparsity", type=float, default=0.9)
    arguments = parser.parse_args()
    world = MPI.COMM_WORLD
    made = tempfile.mkdtemp(dir=arguments.folder) if world.Get_rank() == 0 else None
    folder = Path(world.bcast(made))
    bench = Bench(arguments, folder)
    rows = {method: Row() for method in METHODS}
    bench.step()
    for number in range(arguments.rounds + 1):  # the first warms up
        order = list(METHODS)
        random.Random(number).shuffle(order)  # noqa: S311
        for method in order:
            row = rows[method] if number else Row()
            before = [bench.step() for _ in range(arguments.steps)]
            path = bench.save(method, row, before)
            bench.load(method, path, row)
            bench.undisturbed += before if number else []
            world.Barrier()
            if bench.rank == 0:
                shutil.rmtree(path)
                last = {what: round(values[-1], 3) for what, values in row.seconds.items()}
                print(number, method, last, flush=True)
        if bench.rank == 0 and number:
            report(arguments, bench, rows, number)
    if bench.rank == 0:
        shutil.rmtree(folder)
    world.Barrier()
    dist.destroy_process_group()
    bench.trainer.close()
    bench.transport.close()


if __name__ == "__main__":
    main()
