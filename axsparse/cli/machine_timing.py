"""Measures this machine for the planner: steps in one stage, messages, all-reduces, a copy."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import NamedTuple

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


class Profile(NamedTuple):
    """What training in one stage took on this rank; each step has `MICROBATCHES` microbatches.

    Seconds are medians of steps: of all compute, of compressing gradients, and of the gradients of
    weights that split backwards compute apart.
    """

    trainer: Trainer
    compute: float
    compress: float
    weight: float
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
    begins(f"{counted(steps, 'step')} with microbatches of {other}")
    compute_of_other = _profile(loaded, steps, other).compute
    begins(f"{counted(steps, 'step')} with split backwards")
    # Compiled layers cannot be split.
    weight = 0.0
    if not loaded.config.pipeline.compile:
        weight = _profile(loaded, steps, size, is_split=True).weight
    begins("products of matrices, and a copy in memory")
    precision = profile.trainer.config.precision
    peak, copy = matrix_peak(DTYPES[precision]), _copy_bandwidth()
    figures = [profile.compute, compute_of_other, profile.compress, weight, peak, copy]
    rows = sum_by_owner(transport.world, transport.backoff, [*figures, profile.overhead])
    means = [fmean(column) for column in zip(*rows, strict=True)]
    begins("messages and all-reduces between ranks")
    link = transport.link(Grid(transport.size, 1).place(transport.rank))
    seen = Measurements(
        ranks=transport.size,
        memory_bytes=host_memory_bytes() / transport.size,
        overhead_bytes=max(row[-1] for row in rows),
        compute_seconds=means[0],
        compute_of_other=(other, means[1]),
        compress_seconds=means[2],
        weight_seconds=means[3],
        peak=means[4],
        copy_bandwidth=means[5],
        microbatches=MICROBATCHES,
        microbatch_size=size,
        forwards=profile.forwards,
        messages=_by_size(transport, partial(_one_way, transport, link)),
        all_reduces=_by_size(transport, partial(_all_reduce, transport)),
    )
    ranks = counted(transport.size, "rank")
    source = f"{counted(steps, 'step')} of {loaded.name} in one stage, on {ranks} at once"
    load = _load_of(profile.trainer, loaded.name)
    return together(transport, lambda: fitted(name, load, precision, seen, source))


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


def _profile(loaded: LoadedConfig, steps: int, size: int, *, is_split: bool = False) -> Profile:
    """Train in one stage with microbatches of `size`; each rank by itself, all at the same time."""
    changes = {
        "batch": {"global_batch_size": MICROBATCHES * size, "microbatch_size": size},
        "layout": {
            **{"g_inter": 1, "g_data": 1, "split": "auto", "memory_per_rank": "auto"},
            **{"g_tensor": 1, "tensor_exact": False},
        },
        "pipeline": {"schedule": "message-driven", "split_backward": is_split, "held": "auto"},
    }
    sections: dict[str, object] = {
        section: getattr(loaded.config, section).model_copy(update=values)
        for section, values in changes.items()
    }
    alone = replace(
        loaded, config=loaded.config.model_copy(update={**sections, "transport": "auto"})
    )
    job = Job(LocalTransport(LocalWorld[None](1), 0))
    trainer = build(
        job, named_model(alone), lambda: open_datasets(alone), alone, grid=Grid(1, 1), quiet=True
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
    """Bytes per second of the fastest of several copies in memory, those read and those written."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return 2 * COPY_BYTES / min(times)


def _by_size(
    transport: Transport, seconds: Callable[[torch.Tensor, int], float]
) -> list[tuple[float, float]]:
    """Bytes of what ranks exchange, and seconds on the slowest rank, the same on all ranks.

    `seconds` exchanges a tensor; it is called several times, with the number of the call.
    """
    if transport.size == 1:
        return []
    timings = []
    for size in SIZES:
        times = []
        for number in range(REPEATS):
            sum_by_owner(transport.world, transport.backoff, [0.0])  # waits for all ranks
            times.append(seconds(torch.zeros(size // 4), number))
        rows = sum_by_owner(transport.world, transport.backoff, [median(times)])
        timings.append((float(size), max(row[0] for row in rows)))
    return timings


def _one_way(transport: Transport, link: Link, tensor: torch.Tensor, number: int) -> float:
    """Half the seconds of a message to rank 1 and back; other ranks take part in no message."""
    if transport.rank > 1:
        return 0.0
    began = time.perf_counter()
    if transport.rank == 0:
        link.send(Message(Direction.FORWARD, number, (tensor,), (False,)))
    transport.backoff.reset()
    while not link.arrivals():
        transport.backoff.pause()
    if transport.rank == 1:
        link.send(Message(Direction.BACKWARD, number, (tensor,), (False,)))
    return (time.perf_counter() - began) / 2


def _all_reduce(transport: Transport, buffer: torch.Tensor, _: int) -> float:
    """Seconds of an all-reduce over all ranks."""
    began = time.perf_counter()
    transport.backoff.reset()
    wait(transport.world.start(Op.ALL_REDUCE, buffer), transport.backoff)
    return time.perf_counter() - began
