"""Measures one node for the planner, and writes a cluster file.

    mpirun -n 4 python benchmarks/calibrate.py --config my.yaml --out my_cluster.yaml
    axsparse plan --config my.yaml --gpus 4 --cluster my_cluster.yaml

Every rank trains the model in one stage, all at the same time: with microbatches of two sizes, and
with split backwards. Then two ranks exchange messages, all of them reduce, and memory is copied.
Takes a minute. Start as many ranks as your runs will have on a node, and let nothing else run
meanwhile. Every constant in the file says whether it was measured, fitted or assumed; those between
nodes are assumed to be as within one, so edit them if you know better.
"""

from __future__ import annotations

import argparse
import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median, stdev
from typing import NamedTuple

import torch
import yaml

from axsparse.config.load import configure
from axsparse.config.schema import Config
from axsparse.config.section import counted
from axsparse.data.sources import open_datasets
from axsparse.models.zoo.model_registry import named_model
from axsparse.planner.cluster import Cluster, Kind, Origin, Precision
from axsparse.planner.profiled_model import ProfiledModel
from axsparse.planner.stage_memory import SMALL_BLOCKS, StageLoad
from axsparse.runtime.communication import Direction, Link, Message, Op, Transport, wait
from axsparse.runtime.errors import ConfigError, TrainingError, writing
from axsparse.runtime.exchange import gather_numbers, gather_values, together
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job, run
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.machine import host_memory_bytes, resident_memory_bytes
from axsparse.samo.optim.update import optimizer_of
from axsparse.samo.precision import DTYPES
from axsparse.training.run_recorder import matrix_peak
from axsparse.training.trainer import Trainer, build

MICROBATCHES = 4
"""Of each timed step."""
OTHER_SIZE = 1
"""A second microbatch size, which separates the time that depends on the size from the rest."""
COPY_BYTES = 1 << 26
SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 22)
"""Bytes of the messages and all-reduces that are timed."""
REPEATS = 7
LEAST_SHARE = 0.1
"""Of the time that arithmetic takes elsewhere, weight gradients take at least so much."""


class Profile(NamedTuple):
    """The times of training in one stage on this rank; each step has `MICROBATCHES` microbatches.

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
    """Bytes that the process holds in addition to the model state."""


def calibrate(transport: Transport, loaded: Config, name: str, steps: int) -> Cluster:
    """The cluster of this machine; all ranks call it together and get the same.

    Raises ConfigError for ranks on several hosts, and what building a trainer raises.
    """
    together(transport, lambda: _reject_several_hosts(transport))
    size = loaded.batch.microbatch_size
    other = OTHER_SIZE if size != OTHER_SIZE else 2 * OTHER_SIZE
    profile = _profile(loaded, steps, size)
    compute_of_other = _profile(loaded, steps, other).compute
    # Compiled layers cannot be split.
    weight = 0.0
    if loaded.pipeline.compile is not True:
        weight = _profile(loaded, steps, size, is_split=True).weight
    precision = profile.trainer.config.precision
    assert precision != "auto", "the run has decided"
    peak, copy = matrix_peak(DTYPES[precision]), _copy_bandwidth()
    figures = [profile.compute, compute_of_other, profile.compress, weight, peak, copy]
    rows = gather_numbers(transport, [*figures, profile.overhead])
    means = [fmean(column) for column in zip(*rows, strict=True)]
    link = transport.link(Grid(transport.size, 1).coords(transport.rank))
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
    load = _load_of(profile.trainer)
    return together(transport, lambda: fitted(name, load, precision, seen, source))


def _load_of(trainer: Trainer) -> StageLoad:
    """The load of a rank that trains all layers of the model."""
    live = trainer.live
    kept = {} if live is None else live.targets.kept()
    profile, config = trainer.profile, trainer.config
    model = ProfiledModel(config, profile, kept, optimizer_of(config.optimizer))
    loads = model.stages(1, 1, microbatches=MICROBATCHES)
    assert loads is not None, "without a memory limit one stage always fits"
    return loads[0]


def _reject_several_hosts(transport: Transport) -> None:
    hosts = set(gather_values(transport, socket.gethostname()))
    if len(hosts) > 1:
        raise ConfigError(
            f"calibrate: the ranks stand on {len(hosts)} hosts; start it on the ranks of one, and "
            "edit the constants between nodes in the file"
        )


def _profile(loaded: Config, steps: int, size: int, *, is_split: bool = False) -> Profile:
    """Train in one stage with microbatches of `size`; each rank by itself, all at the same time."""
    alone = loaded.with_values(
        {
            "batch.global_batch_size": MICROBATCHES * size,
            "batch.microbatch_size": size,
            **{f"layout.{axis}": 1 for axis in ("g_inter", "g_data", "g_tensor")},
            **{f"layout.{key}": "auto" for key in ("split", "memory_per_rank")},
            "pipeline.schedule": "message-driven",
            "pipeline.split_backward": is_split,
            "transport": "auto",
        }
    )
    job = Job(LocalTransport())
    trainer = build(job, named_model(alone), lambda: open_datasets(alone), alone, quiet=True)
    overhead = max(0, resident_memory_bytes() - trainer.state_bytes().total)
    phases = trainer.phases
    trainer.step()  # not timed, since it allocates and compiles
    compute, compress, weight, forwards = [], [], [], []
    for _ in range(steps):
        phases.start_spans()
        phases.begin_step()
        trainer._step.train_step()  # `step` would end its own phases, and keep their seconds
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
            gather_numbers(transport, [0.0])  # waits for all ranks
            times.append(seconds(torch.zeros(size // 4), number))
        rows = gather_numbers(transport, [median(times)])
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


# --- from figures to constants ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """The figures of a calibration: for each rank a median, and then the mean over ranks.

    Seconds are per step of `microbatches` microbatches in one stage.
    """

    ranks: int
    memory_bytes: float
    """Memory that the host leaves to each rank."""
    overhead_bytes: float
    """Memory that a rank held in addition to model state before the first step."""
    peak: float
    """Flop/s of a square matrix product."""
    copy_bandwidth: float
    """Bytes that a copy reads and writes in a second."""
    compute_seconds: float
    """All forwards and backwards, without compression."""
    compute_of_other: tuple[int, float] | None
    """Another microbatch size, and its `compute_seconds`; None if one size was measured."""
    compress_seconds: float
    """All compression; 0 for a dense model."""
    weight_seconds: float = 0.0
    """All weight gradients of split backwards, without compression; 0 if not measured."""
    microbatches: int
    microbatch_size: int
    forwards: Sequence[float]
    """Seconds of single forwards, whose spread is the jitter."""
    messages: Sequence[tuple[float, float]]
    """Bytes of messages, and seconds from the sender's call to the arrival; empty with one rank."""
    all_reduces: Sequence[tuple[float, float]]
    """Bytes and seconds of all-reduces; empty with one rank."""


class _Constant(NamedTuple):
    """A constant of the cluster and where it comes from."""

    value: float
    kind: Kind
    source: str


def fitted(
    name: str, load: StageLoad, precision: Precision, seen: Measurements, source: str
) -> Cluster:
    """The cluster with which the formulas of `step_cost` give what was measured.

    `load` is what a rank computed, `source` names the run in the origins of the constants.
    TrainingError if the model took less time than moving its activations does.
    """
    small = f"resident beside model state, and {SMALL_BLOCKS / 1e6:.0f} MB later"
    memory = f"memory of the host / {seen.ranks} ranks"
    jitter = "sigma of the logarithm of single forwards"
    constants: dict[str, _Constant] = {
        "memory_bytes": _Constant(seen.memory_bytes, "measured", memory),
        "gpus_per_node": _Constant(seen.ranks, "measured", "ranks of this run"),
        **_compute_constants(load, precision, seen, source),
        **_network_constants(seen),
        "overhead_bytes": _Constant(seen.overhead_bytes + SMALL_BLOCKS, "measured", small),
        "jitter": _Constant(spread(seen.forwards), "measured", jitter),
    }
    values = {key: constant.value for key, constant in constants.items()}
    gpus = int(values.pop("gpus_per_node"))
    origins = {key: Origin(one.kind, one.source) for key, one in constants.items()}
    return Cluster(name=name, gpus_per_node=gpus, origins=origins, **values)


def _compute_constants(
    load: StageLoad, precision: Precision, seen: Measurements, source: str
) -> dict[str, _Constant]:
    """The rates of arithmetic, of passes over the weights, and of compression."""
    mbs = seen.microbatches * seen.microbatch_size
    passed = _size_independent_seconds(seen)
    moved = mbs * (3 * load.moved + load.again_moved) / seen.copy_bandwidth
    beside = seen.microbatches * passed + moved
    arithmetic = seen.compute_seconds - beside
    if arithmetic <= 0:
        raise TrainingError(
            f"calibrate: forwards and backwards took {seen.compute_seconds:.3g} s, less than the "
            f"{beside:.3g} s that moving weights and activations takes; take a larger model, whose "
            "activations do not stay in caches, and more --steps where others use the machine"
        )
    reached = mbs * (3 * load.flops + load.again_flops) / arithmetic
    # The model's products may be faster than the square one that was timed.
    peak = max(seen.peak, reached)
    found = {
        f"peak_{precision}": _Constant(peak, "measured", "square matrix products"),
        "efficiency": _Constant(reached / peak, "fitted", f"{source}: its compute"),
        "memory_bandwidth": _Constant(seen.copy_bandwidth, "measured", "a copy, all ranks at once"),
        "compression_rate": _Constant(2e8, "assumed", "the model was dense"),
    }
    flops = mbs * load.weight_flops
    if seen.weight_seconds and flops:
        # On a busy machine the pass over the weights may be measured as longer than all of them.
        seconds = seen.weight_seconds - seen.microbatches * passed / 3
        share = max(LEAST_SHARE, seconds * reached / flops)
        found["weight_share"] = _Constant(share, "fitted", f"{source}, with split backwards")
    if passed:
        rate = 3 * load.trained / passed
        found["weight_rate"] = _Constant(rate, "fitted", f"{source}: two microbatch sizes")
    if seen.compress_seconds:
        rate = seen.microbatches * load.trained / seen.compress_seconds
        found["compression_rate"] = _Constant(rate, "measured", f"{source}: its compression")
    return found


def _network_constants(seen: Measurements) -> dict[str, _Constant]:
    """Latencies and bandwidths of messages and all-reduces.

    A single rank takes a copy's.
    """
    message = ring = _Constant(seen.copy_bandwidth, "assumed", "as a copy: only one rank was there")
    message_latency = ring_latency = message._replace(value=0.0)
    if seen.messages:
        latency, rate = _line(seen.messages)
        # One message takes the sender's time and the receiver's.
        message = _Constant(2 * rate, "measured", "ping-pong of two ranks")
        message_latency = message._replace(value=latency)
    if seen.all_reduces:
        hops = 2 * (seen.ranks - 1)
        latency, rate = _line(seen.all_reduces)
        ring = _Constant(rate * hops / seen.ranks, "measured", f"all-reduces of {seen.ranks} ranks")
        ring_latency = ring._replace(value=latency / hops)
    within = "as within a node: one node was measured"
    return {
        "intra_node_bandwidth": message,
        "intra_node_latency": message_latency,
        "inter_node_bandwidth": _Constant(message.value, "assumed", within),
        "inter_node_latency": _Constant(message_latency.value, "assumed", within),
        "nic_bandwidth": _Constant(ring.value, "assumed", within),
        "nic_efficiency": _Constant(1.0, "assumed", within),
        "ring_bandwidth": ring,
        "ring_latency": ring_latency,
    }


def _size_independent_seconds(seen: Measurements) -> float:
    """Seconds of a microbatch's forward and backward that do not depend on its size.

    0 if only one size was measured, or if the time grew faster than the size.
    """
    if seen.compute_of_other is None:
        return 0.0
    other, seconds = seen.compute_of_other
    size = seen.microbatch_size
    found = (other * seen.compute_seconds - size * seconds) / (other - size) / seen.microbatches
    return max(0.0, found)


def spread(seconds: Sequence[float]) -> float:
    """The standard deviation of the logarithms.

    The slowest tenth is left out: other processes have interrupted it.
    """
    kept = sorted(seconds)[: max(2, math.ceil(0.9 * len(seconds)))]
    return stdev(map(math.log, kept)) if len(kept) > 1 else 0.0


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit `seconds = latency + bytes / rate` to (bytes, seconds) by least squares of relative
    errors, with neither below 0; returns latency and rate."""
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / total
    over = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points, strict=True))
    under = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    slope = over / under if under else 0.0
    latency = mean_y - slope * mean_x
    if slope <= 0 or latency < 0:
        return 0.0, 1 / fmean(y / x for x, y in points)
    return latency, 1 / slope


def to_yaml(cluster: Cluster) -> str:
    """Write the text of a cluster file, which `load_cluster` reads back as an equal cluster."""
    lines = []
    for name, origin in cluster.origins.items():
        source = yaml.safe_dump(origin.source, width=math.inf, default_style='"').strip()
        value = getattr(cluster, name)
        lines.append(f"{name}: {{value: {value!r}, kind: {origin.kind}, source: {source}}}")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure on all ranks, write the file and print it."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = arguments.add_argument
    add("--config", required=True, help="a configuration of the model, or a bundled one's name")
    add("--set", metavar="KEY=VALUE", action="append", default=[], dest="pairs")
    add("--out", metavar="FILE", type=Path, required=True, help="the cluster file to write")
    add("--steps", metavar="N", type=int, default=10, help="timed steps (default %(default)s)")
    asked = arguments.parse_args()

    def work(job: Job) -> None:
        loaded = together(job.transport, lambda: configure(asked.config, asked.pairs))
        cluster = calibrate(job.transport, loaded, asked.out.stem, asked.steps)
        if job.transport.rank == 0:
            with writing(f"--out {asked.out}: the cluster file", "choose another place"):
                asked.out.write_text(to_yaml(cluster), encoding="utf-8")
            print(to_yaml(cluster), end="", flush=True)

    run(work)


if __name__ == "__main__":
    main()
