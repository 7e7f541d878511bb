"""Does it pay to push MPI along while a stage computes? No thread, a thread, and hooks.

    mpirun -n 2 python benchmarks/progress.py [--save benchmarks/results/progress.json]
    chrt --rr 5 mpirun -n 4 python benchmarks/progress.py --sleep [--save …]

MPI moves large messages only while somebody is in an MPI call, and a content is received
only once its header has been seen. The engine looks between actions. Variants, in turn:

- none: as the package is
- thread: a thread looks for arrivals every millisecond, under a lock
- layers: looks before every layer of a forward and after every layer of a backward

Engine, policy and links are the package's own, messages real. Stages compute matrix
products on one core, or with --sleep they sleep 5 ms a layer in a forward and 10 ms in a
backward: then a thread takes nothing from the compute, and what it saves is the most that
it can save. What is compared is the ratio within a round of all variants, in an order drawn
anew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from emulated import machine
from mpi4py import MPI
from torch import Tensor, nn

from axsparse.data.batches import Batch, Microbatch
from axsparse.observe.phases import Phases
from axsparse.pipeline.engine import Engine, Rank
from axsparse.pipeline.schedules import Schedule
from axsparse.runtime.communication import Link, Message
from axsparse.runtime.exchange import sum_by_owner
from axsparse.runtime.grid import Grid, Place
from axsparse.runtime.mpi.mpi_transport import MpiTransport

VARIANTS = ("none", "thread", "layers")
MICROBATCHES = 8
LAYERS = 4
SIZES = {"1 MB": (512, 512), "2 MB": (512, 1024), "4 MB": (2048, 512)}
"""Tokens and width of an activation in fp32."""
THREAD_SECONDS = 1e-3
SLEEP_SECONDS = 5e-3


class PushedLink:
    """A link whose arrivals may be collected ahead of the engine, by whoever pushes."""

    def __init__(self, link: Link) -> None:
        self.bytes_sent = 0
        self._link = link
        self._lock = threading.Lock()
        self._collected: list[Message] = []

    @property
    def unsent(self) -> int:
        with self._lock:
            return self._link.unsent

    def send(self, message: Message) -> None:
        with self._lock:
            self._link.send(message)

    def push(self) -> None:
        with self._lock:
            self._collected += self._link.arrivals()

    def arrivals(self) -> list[Message]:
        with self._lock:
            found = self._collected + self._link.arrivals()
            self._collected = []
            return found

    def close(self) -> None:
        self._link.close()


class ComputingStage:
    """Takes the place of `pipeline.stage.Stage`: layers with recomputation left out."""

    def __init__(self, place: Place, width: int, before_layer: Callable[[], None]) -> None:
        self._place = place
        self._layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(LAYERS)]
        self._before_layer = before_layer
        self._live: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, microbatch: int, inputs: Sequence[Tensor], *_: object) -> tuple[Tensor, ...]:
        (values,) = inputs
        for layer in self._layers:
            self._before_layer()
            values = layer(values)
            values.register_hook(lambda _: self._before_layer())
        self._live[microbatch] = (inputs[0], values)
        return (values.sum(),) if self._place.is_last else (values,)

    def backward(
        self, microbatch: int, gradients: Sequence[Tensor], *_: object
    ) -> list[Tensor | None]:
        inputs, outputs = self._live.pop(microbatch)
        outputs.backward(torch.ones_like(outputs) if self._place.is_last else gradients[0])
        return [] if self._place.is_first else [inputs.grad]


class SleepingStage:
    """The same in time, without the compute; messages of the same size."""

    def __init__(self, place: Place, size: tuple[int, int], before_layer: Callable[[], None]):
        self._place = place
        self._values = torch.zeros(size)
        self._before_layer = before_layer

    def forward(self, *_: object) -> tuple[Tensor, ...]:
        for _layer in range(LAYERS):
            self._before_layer()
            time.sleep(SLEEP_SECONDS)
        return (torch.zeros(()),) if self._place.is_last else (self._values.clone(),)

    def backward(self, *_: object) -> list[Tensor | None]:
        for _layer in range(LAYERS):
            time.sleep(2 * SLEEP_SECONDS)
            self._before_layer()
        return [] if self._place.is_first else [self._values.clone()]


def step_seconds(
    transport: MpiTransport,
    place: Place,
    link: Link,
    variant: str,
    size: tuple[int, int],
    *,
    sleeps: bool,
) -> tuple[float, float]:
    """Seconds of one step from a common start, on the rank that ends last; mean bubble."""
    tokens, width = size
    pushed = PushedLink(link)
    torch.manual_seed(1)
    nothing: Callable[[], None] = lambda: None  # noqa: E731
    before_layer = pushed.push if variant == "layers" else nothing
    stage: Any = (
        SleepingStage(place, size, before_layer)
        if sleeps
        else ComputingStage(place, width, before_layer)
    )
    phases = Phases()
    engine = Engine(
        Rank(place, transport.backoff, phases),
        stage,
        pushed,
        schedule=Schedule("message-driven", 1, "alternate"),
        while_idle=lambda: None,
    )
    inputs = (torch.randn(tokens, width),) if place.is_first else ()
    batch = Batch(0, tuple(Microbatch(inputs, None, n, 1) for n in range(MICROBATCHES)), 1)
    stopping = threading.Event()

    def push_on() -> None:
        while not stopping.wait(THREAD_SECONDS):
            pushed.push()

    thread = threading.Thread(target=push_on) if variant == "thread" else None
    rows = sum_by_owner(transport.world, transport.backoff, [time.monotonic()])
    start = max(row[0] for row in rows) + 0.005
    time.sleep(max(0.0, start - time.monotonic()))
    if thread is not None:
        thread.start()
    phases.begin_step()
    engine.train(batch, 1.0, 1.0, lambda _: None)
    seconds = phases.end_step()
    own = time.monotonic() - start
    if thread is not None:
        stopping.set()
        thread.join()
    rows = sum_by_owner(transport.world, transport.backoff, [own, seconds["compute"]])
    return max(row[0] for row in rows), statistics.fmean(row[1] for row in rows)


def save(arguments: argparse.Namespace, transport: MpiTransport, result: dict[str, Any]) -> None:
    """Put what is there so far into the file."""
    path: Path = arguments.save
    found = json.loads(path.read_text()) if path.exists() else {}
    kind = "sleeping" if arguments.sleep else "computing"
    found[f"{transport.size} ranks, {kind}"] = {
        "machine": {**machine(), "transport": transport.name},
        "rounds": arguments.rounds,
        "sizes": result,
    }
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Measure on the ranks of this job; rank 0 reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    transport = MpiTransport(MPI.COMM_WORLD)
    place = Grid(transport.size, 1).place(transport.rank)
    link = transport.link(place)
    result: dict[str, Any] = {}
    for name in arguments.sizes:
        size = SIZES[name]
        seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        compute: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for number in range(arguments.rounds + 1):  # the first warms up
            order = list(VARIANTS)
            random.Random(number).shuffle(order)  # noqa: S311
            for variant in order:
                step, busy = step_seconds(
                    transport, place, link, variant, size, sleeps=arguments.sleep
                )
                if number:
                    seconds[variant].append(step)
                    compute[variant].append(busy)
        result[name] = {
            variant: {
                "step_ms": [round(1e3 * v, 1) for v in statistics.quantiles(seconds[variant], n=4)],
                "step_over_none": [
                    round(value, 4)
                    for value in statistics.quantiles(
                        [a / b for a, b in zip(seconds[variant], seconds["none"], strict=True)],
                        n=4,
                    )
                ]
                if variant != "none"
                else [1.0],
                "compute_ms": round(1e3 * statistics.median(compute[variant]), 1),
                "best_step_ms": round(1e3 * min(seconds[variant]), 1),
            }
            for variant in VARIANTS
        }
        if place.rank == 0:
            print(name, json.dumps(result[name]), flush=True)
            if arguments.save:
                save(arguments, transport, result)
    transport.close()


if __name__ == "__main__":
    main()
