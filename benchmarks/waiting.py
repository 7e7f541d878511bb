"""How a waiting rank gives its core away and comes back: ways of waiting, measured in turn.

    for n in 2 4 8; do
      mpirun -n $n python benchmarks/waiting.py --save benchmarks/results/waiting.json
    done

Two measurements, on as many ranks as there are:

- **Messages.** Every second rank computes some 10 ms and sends the time to its neighbour, which
  does nothing but wait for it: the delay is from the send to the arrival, and the waiting rank's
  CPU is its share of a core.
- **Steps** of a small GPT, half of the ranks stages and half of them replicas (2 ranks: two
  stages). Each step is waited in another way than the one before, and all ways are in each round,
  in the reverse order in every other round; ratios of seconds and of CPU seconds of all ranks are
  taken to the first way within the round.

On a machine with fewer cores than ranks, waiting ranks take from those that compute. A way is
named by its pauses: "20 polls" without any, "yields" that only let another go first, then sleeps
in microseconds, of which the last is repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from host_machine import host_machine
from mpi4py import MPI
from peers.contenders.ours import InOrder, model_of
from peers.gpt import Stream
from peers.workload import Size

import axsparse as ax
from axsparse.runtime.exchange import sum_by_owner
from axsparse.runtime.mpi.mpi_transport import MpiTransport

SIZE = Size("waiting", blocks=4, width=256, heads=4, tokens=128, vocabulary=1024)
BURN_SECONDS = 0.010


@dataclass(frozen=True)
class Way:
    """Pauses in a row: polls without one, yields, sleeps in µs of which the last is repeated."""

    polls: int = 0
    yields: int = 0
    sleeps: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        sleeps = [f"{count}×{us}" for us, count in _runs(self.sleeps)]
        parts = [f"{self.polls} polls"] * bool(self.polls)
        parts += [f"{self.yields} yields"] * bool(self.yields)
        return ", ".join([*parts, *sleeps]) or "polls"

    def pause(self, number: int) -> None:
        """The pause of this number since the last `reset`, from 0."""
        number -= self.polls
        if number < 0:
            return
        number -= self.yields
        if number < 0:
            os.sched_yield()
        else:
            time.sleep(1e-6 * self.sleeps[min(number, len(self.sleeps) - 1)])


def _runs(values: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for value in values:
        if runs and runs[-1][0] == value:
            runs[-1] = value, runs[-1][1] + 1
        else:
            runs.append((value, 1))
    return runs


def ways() -> list[Way]:
    """The package's two, of ranks with a core of their own (what all are held against) and of
    ranks that share theirs; longer sleeps; the same after yields; yields alone."""
    doubling = (50, 100, 200, 400, 800, 1000)
    return [
        Way(20, 0, (*[50] * 20, 200)),
        Way(0, 0, (50, 100, 200, 500)),
        Way(0, 0, doubling),
        Way(0, 5, doubling),
        Way(0, 10**9),
    ]


class Switched:
    """A `Backoff` that waits in the way that is set."""

    def __init__(self, way: Way) -> None:
        self.pauses = 0
        self.way = way
        self._in_a_row = 0

    def pause(self) -> None:
        self.pauses += 1
        self.way.pause(self._in_a_row)
        self._in_a_row += 1

    def reset(self) -> None:
        self._in_a_row = 0


# -- messages ---------------------------------------------------------------------------------


def messages(comm: MPI.Comm, backoff: Switched, ways: Sequence[Way], rounds: int) -> list[Any]:
    """By way, milliseconds of delay of each message and the share of a core that waiting takes."""
    generator = random.Random(comm.rank)  # noqa: S311 - so that senders are not in step
    values = torch.rand(256, 256)
    peer = comm.rank ^ 1
    delays: list[list[float]] = [[] for _ in ways]
    shares: list[list[float]] = [[] for _ in ways]
    for number in range(rounds):
        for at in _order(len(ways), number):
            backoff.way = ways[at]
            stamp = torch.zeros(1, dtype=torch.float64).numpy()
            if comm.rank % 2 == 0:
                end = time.thread_time() + BURN_SECONDS * generator.uniform(0.5, 1.5)
                while time.thread_time() < end:
                    values @ values
                stamp[0] = time.monotonic()
                comm.Send([stamp, MPI.DOUBLE], peer)
                comm.Recv([stamp, MPI.DOUBLE], peer)
            else:
                began, cpu = time.monotonic(), time.thread_time()
                request = comm.Irecv([stamp, MPI.DOUBLE], peer)
                backoff.reset()
                while not request.Test():
                    backoff.pause()
                ended = time.monotonic()
                delays[at].append(1e3 * (ended - stamp[0]))
                shares[at].append((time.thread_time() - cpu) / (ended - began))
                comm.Send([stamp, MPI.DOUBLE], peer)
    found = comm.gather((delays, shares))
    if found is None:
        return []
    return [
        {
            "way": way.name,
            "delay_ms": _spread([x for delays, _ in found for x in delays[at]]),
            "share_of_a_core": _spread([x for _, shares in found for x in shares[at]]),
        }
        for at, way in enumerate(ways)
    ]


def _order(count: int, number: int) -> list[int]:
    return list(range(count))[:: -1 if number % 2 else 1]


def _spread(values: Sequence[float]) -> Mapping[str, float]:
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    names = {"10 %": deciles[0], "median": statistics.median(values), "90 %": deciles[8]}
    return {name: float(f"{value:.4g}") for name, value in names.items()}


# -- steps ------------------------------------------------------------------------------------


def steps(transport: MpiTransport, ways: Sequence[Way], rounds: int) -> list[Any]:
    """By way, ratios of a step to that of the first way in the same round."""
    backoff = transport.backoff
    assert isinstance(backoff, Switched)
    stages = 2
    count = rounds * len(ways) + 2
    config = ax.configure(
        {
            "batch": {"global_batch_size": SIZE.microbatches, "microbatch_size": 1},
            "layout": {"g_inter": stages, "g_data": transport.size // stages},
            "precision": "bf16",
            "train": {"steps": count, "eval_every": 0, "eval_steps": 0, "peak_flops": 1e9},
        }
    )
    data = ax.Datasets(InOrder(Stream(SIZE, count), SIZE.tokens))
    trainer = ax.build(ax.Job(transport), model_of(SIZE, "bf16"), lambda: data, config, quiet=True)
    for _ in range(2):
        trainer.step()
    taken: list[list[tuple[float, float]]] = []
    for number in range(rounds):
        row = [(0.0, 0.0)] * len(ways)
        for at in _order(len(ways), number):
            backoff.way = ways[at]
            sum_by_owner(transport.world, backoff, [0.0])
            began, cpu = time.monotonic(), time.process_time()
            trainer.step()
            rows = sum_by_owner(transport.world, backoff, [time.process_time() - cpu])
            row[at] = time.monotonic() - began, sum(value for (value,) in rows)
        taken.append(row)
    trainer.close()
    first = [row[0] for row in taken]
    return [
        {
            "way": way.name,
            "milliseconds": _spread([1e3 * row[at][0] for row in taken]),
            "cpu_milliseconds": _spread([1e3 * row[at][1] for row in taken]),
            "ratio": _spread([row[at][0] / one[0] for row, one in zip(taken, first, strict=True)]),
            "cpu_ratio": _spread(
                [row[at][1] / one[1] for row, one in zip(taken, first, strict=True)]
            ),
        }
        for at, way in enumerate(ways)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--save", type=Path, help="add to this JSON file")
    parser.add_argument("--messages", type=int, default=40, help="rounds of messages")
    parser.add_argument("--steps", type=int, default=20, help="rounds of steps")
    arguments = parser.parse_args()
    comm = MPI.COMM_WORLD
    if comm.size % 2:
        parser.error(f"{comm.size} ranks: start an even number")
    torch.set_num_threads(1)
    all_ways = ways()
    transport = MpiTransport(comm)
    result: dict[str, Any] = {"ranks": comm.size, "load": os.getloadavg()[0]}
    switched = Switched(all_ways[0])
    if arguments.messages:
        result["messages"] = messages(comm, switched, all_ways, arguments.messages)
    if arguments.steps:
        # All that the transport has made so far waits by its own back-off.
        transport.close()
        transport = MpiTransport(comm, switched)
        result["steps"] = steps(transport, all_ways, arguments.steps)
    transport.close()
    if comm.rank:
        return
    for name in ("messages", "steps"):
        for row in result.get(name, ()):
            print(name, json.dumps(row), flush=True)
    if arguments.save:
        whole = json.loads(arguments.save.read_text()) if arguments.save.exists() else {}
        whole[f"{comm.size} ranks"] = result | {"machine": host_machine()}
        arguments.save.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
