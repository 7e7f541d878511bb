"""Measures this machine for the planner: steps in one stage, messages, all-reduces, a copy."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean, median

import torch

from axsparse.config.load import LoadedConfig
from axsparse.config.validate import counted
from axsparse.data.sources import open_datasets
from axsparse.models.zoo.model_registry import named_model
from axsparse.planner.cluster import Cluster
from axsparse.planner.cluster_fit import Measurements, fitted
from axsparse.planner.surveyed_model import SurveyedModel
from axsparse.planner.workload import StageLoad
from axsparse.runtime.communication import Direction, Link, Message, Op, Transport, wait
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.exchange import gather_texts, sum_by_owner, together
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.runtime.process_memory import host_memory_bytes, resident_memory_bytes
from axsparse.samo.optim.optimizer import optimizer_of
from axsparse.samo.precision import DTYPES
from axsparse.training.build import build
from axsparse.training.run_recorder import matrix_peak
from axsparse.training.trainer import Trainer

MICROBATCHES = 4
PARTS = 5
"""How many times `calibrate` says what it measures next."""
OTHER_SIZE = 1
"""A second microbatch size, which separates the time that depends on the size from the rest."""
COPY_BYTES = 1 << 26
SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 22)
"""Bytes of the messages and all-reduces that are timed."""
REPEATS = 7


@dataclass(frozen=True)
class Profile:
    """What training in one stage took on this rank; each step has `MICROBATCHES` microbatches."""

    trainer: Trainer
    compute: float
    """Median seconds a step computes."""
    compress: float
    """Median seconds a step compresses gradients."""
    weight: float
    """Median seconds a step computes gradients of weights that split backwards have left."""
    forwards: list[float]
    """Seconds of every single forward."""
    overhead: float
    """Bytes that the process holds besides the model state."""


def calibrate(
    transport: Transport,
    loaded: LoadedConfig,
    name: str,
    steps: int,
    begins: Callable[[str], object] = lambda _: None,
) -> Cluster:
    """The cluster of this machine; all ranks call it together and get the same.

    `begins` is called with what is measured next. Raises ConfigError for ranks on several hosts,
    and what building a trainer raises.
    """
    together(transport, lambda: _refuse_several_hosts(transport))
    size = loaded.config.batch.microbatch_size
    other = OTHER_SIZE if size != OTHER_SIZE else 2 * OTHER_SIZE
    begins(f"{counted(steps, 'step')} with microbatches of {size}")
    profile = _profile(loaded, steps, size)
    config = profile.trainer.config
    begins(f"{counted(steps, 'step')} with microbatches of {other}")
    compute_of_other = _profile(loaded, steps, other).compute
    begins(f"{counted(steps, 'step')} with split backwards")
    weight = _weight_seconds(loaded, steps, size)
    begins("products of matrices, and a copy in memory")
    own = [
        profile.compute,
        compute_of_other,
        profile.compress,
        matrix_peak(DTYPES[config.precision]),
        _copy_bandwidth(),
        weight,
        profile.overhead,
    ]
    rows = sum_by_owner(transport.world, transport.backoff, own)
    compute, of_other, compress, peak, copy, weight, _ = (
        fmean(column) for column in zip(*rows, strict=True)
    )
    begins("messages and all-reduces between ranks")
    messages = _messages(transport)
    all_reduces = _all_reduces(transport)
    seen = Measurements(
        ranks=transport.size,
        memory_bytes=host_memory_bytes() / transport.size,
        overhead_bytes=max(row[-1] for row in rows),
        peak=peak,
        copy_bandwidth=copy,
        compute_seconds=compute,
        compute_of_other=(other, of_other),
        compress_seconds=compress,
        weight_seconds=weight,
        microbatches=MICROBATCHES,
        microbatch_size=size,
        forwards=profile.forwards,
        messages=messages,
        all_reduces=all_reduces,
    )
    ranks = counted(transport.size, "rank")
    source = f"{counted(steps, 'step')} of {loaded.name} in one stage, on {ranks} at once"
    load = _load_of(profile.trainer, loaded.name)
    return together(transport, lambda: fitted(name, load, config.precision, seen, source))


def _load_of(trainer: Trainer, name: str) -> StageLoad:
    """What a rank computes that trains all layers of the model `name`."""
    live = trainer.parts.live
    kept = {} if live is None else live.targets.kept()
    survey, config = trainer.parts.survey, trainer.config
    subject = SurveyedModel(config, survey, name, kept, optimizer_of(config.optimizer))
    loads = subject.stages(1, 1, microbatches=MICROBATCHES)
    assert loads is not None, "without a memory limit one stage always fits"
    return loads[0]


def _refuse_several_hosts(transport: Transport) -> None:
    hosts = set(gather_texts(transport.world, transport.backoff, socket.gethostname()))
    if len(hosts) > 1:
        raise ConfigError(
            f"calibrate: the ranks stand on {len(hosts)} hosts; start it on the ranks of one, and "
            "edit the constants between nodes in the file"
        )


def _weight_seconds(loaded: LoadedConfig, steps: int, size: int) -> float:
    """Median seconds of a step's weight gradients; 0 where backwards cannot be split."""
    if loaded.config.pipeline.compile:
        return 0.0
    return _profile(loaded, steps, size, is_split=True).weight


def _profile(loaded: LoadedConfig, steps: int, size: int, *, is_split: bool = False) -> Profile:
    """Train in one stage with microbatches of `size`; each rank by itself, all at the same time."""
    config = loaded.config
    split = {"schedule": "message-driven", "split_backward": is_split, "held": "auto"}
    alone = config.model_copy(
        update={
            "batch": config.batch.model_copy(
                update={"global_batch_size": MICROBATCHES * size, "microbatch_size": size}
            ),
            "layout": config.layout.model_copy(
                update={
                    **{"g_inter": 1, "g_data": 1, "g_inter_pruned": None},
                    **{"split": "auto", "memory_per_rank": "auto"},
                }
            ),
            "pipeline": config.pipeline.model_copy(update=split),
            "transport": "auto",
        }
    )
    world: LocalWorld[None] = LocalWorld(1)
    job = Job(LocalTransport(world, 0))
    own = replace(loaded, config=alone)
    trainer = build(
        job, named_model(own), lambda: open_datasets(own), own, grid=Grid(1, 1), quiet=True
    )
    overhead = max(0, resident_memory_bytes() - trainer.state_bytes().total)
    phases = trainer.parts.phases
    trainer.step()  # not timed, since it allocates and compiles
    compute, compress, weight, forwards = [], [], [], []
    for _ in range(steps):
        phases.start_spans()
        phases.begin_step()
        trainer.step()
        seconds = phases.end_step()
        compute.append(seconds["compute"])
        compress.append(seconds["compress"])
        spans = [
            (action, end - begin)
            for phase, action, begin, end in phases.take_spans()
            if phase == "compute"
        ]
        forwards += [length for action, length in spans if action.startswith("F")]
        weight.append(sum(length for action, length in spans if action.startswith("W")))
    trainer.close()
    return Profile(trainer, median(compute), median(compress), median(weight), forwards, overhead)


def _copy_bandwidth() -> float:
    """Bytes per second of a copy in memory, counting those read and those written."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    return 2 * COPY_BYTES / _best(lambda: target.copy_(source))


def _best(work: Callable[[], object]) -> float:
    """Seconds of the fastest of several repetitions."""
    found = math.inf
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        found = min(found, time.perf_counter() - began)
    return found


def _messages(transport: Transport) -> list[tuple[float, float]]:
    """Bytes and one-way seconds between the ranks 0 and 1, the same on all ranks."""
    if transport.size == 1:
        return []
    place = Grid(transport.size, 1).place(transport.rank)
    link = transport.link(place)
    found = []
    for size in SIZES:
        times = [_round_trip(transport, link, size, n) / 2 for n in range(REPEATS)]
        rows = sum_by_owner(transport.world, transport.backoff, [median(times)])
        found.append((float(size), rows[0][0]))
    return found


def _round_trip(transport: Transport, link: Link, size: int, number: int) -> float:
    """Seconds of a message to rank 1 and back; other ranks take part in no message."""
    tensor = torch.zeros(size // 4)
    sum_by_owner(transport.world, transport.backoff, [0.0])  # waits for all ranks
    began = time.perf_counter()
    if transport.rank == 0:
        link.send(Message(Direction.FORWARD, number, (tensor,), (False,)))
    if transport.rank in (0, 1):
        transport.backoff.reset()
        while not link.arrivals():
            transport.backoff.pause()
    if transport.rank == 1:
        link.send(Message(Direction.BACKWARD, number, (tensor,), (False,)))
    return time.perf_counter() - began


def _all_reduces(transport: Transport) -> list[tuple[float, float]]:
    """Bytes and seconds of all-reduces over all ranks, the same on all ranks."""
    if transport.size == 1:
        return []
    return [(float(size), _all_reduce(transport, size)) for size in SIZES]


def _all_reduce(transport: Transport, size: int) -> float:
    """Median seconds of an all-reduce of `size` bytes, on the slowest rank."""
    buffer = torch.zeros(size // 4)
    times = []
    for _ in range(REPEATS):
        sum_by_owner(transport.world, transport.backoff, [0.0])
        began = time.perf_counter()
        transport.backoff.reset()
        wait(transport.world.start(Op.ALL_REDUCE, buffer), transport.backoff)
        times.append(time.perf_counter() - began)
    rows = sum_by_owner(transport.world, transport.backoff, [median(times)])
    return max(row[0] for row in rows)
