"""Fits the constants of a cluster file to what was measured on a machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import NamedTuple

from axsparse.planner.cluster import Cluster, Kind, Origin, Precision
from axsparse.planner.stage_memory import SMALL_BLOCKS
from axsparse.planner.workload import StageLoad
from axsparse.runtime.errors import TrainingError

LEAST_SHARE = 0.1
"""Of the time that arithmetic takes elsewhere, weight gradients take at least so much."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What a calibration measured: for each rank a median, and then the mean over ranks."""

    ranks: int
    """Number of ranks, all on one node and all at work at the same time."""
    memory_bytes: float
    """Memory that the host leaves to each rank."""
    overhead_bytes: float
    """Memory that a rank held beside model state before the first step."""
    peak: float
    """Flop/s of a square matrix product."""
    copy_bandwidth: float
    """Bytes that a copy reads and writes in a second."""
    compute_seconds: float
    """Seconds of all forwards and backwards of a step in one stage, without compression."""
    compute_of_other: tuple[int, float] | None
    """Another microbatch size, and the `compute_seconds` of as many microbatches of that size;
    None if only one size was measured."""
    compress_seconds: float
    """Seconds of all compression of a step; 0 for a dense model."""
    weight_seconds: float = 0.0
    """Seconds of all weight gradients of a step with split backwards, without compression; 0 if
    that was not measured."""
    microbatches: int
    microbatch_size: int
    forwards: Sequence[float]
    """Seconds of single forwards, whose spread is the jitter."""
    messages: Sequence[tuple[float, float]]
    """Bytes of messages, and seconds from the sender's call to the arrival; empty with one rank."""
    all_reduces: Sequence[tuple[float, float]]
    """Bytes and seconds of all-reduces; empty with one rank."""


def fitted(
    name: str, load: StageLoad, precision: Precision, seen: Measurements, source: str
) -> Cluster:
    """The cluster with which the formulas of `step_cost` give what was measured.

    `load` is what a rank computed, `source` names the run in the origins of the constants.
    TrainingError if the model took less time than moving its activations does.
    """
    constants: dict[str, _Constant] = {
        "memory_bytes": _Constant(
            seen.memory_bytes, "measured", f"memory of the host / {seen.ranks} ranks"
        ),
        **_compute_constants(load, precision, seen, source),
        **_message_constants(seen),
        **_ring_constants(seen),
        **_gradient_constants(load, seen, source),
        "overhead_bytes": _Constant(
            seen.overhead_bytes + SMALL_BLOCKS,
            "measured",
            f"resident beside model state, and {SMALL_BLOCKS / 1e6:.0f} MB later",
        ),
        "jitter": _Constant(
            spread(seen.forwards), "measured", "sigma of the logarithm of single forwards"
        ),
    }
    values = {key: constant.value for key, constant in constants.items()}
    gpus = int(values.pop("gpus_per_node"))
    origins = {key: Origin(one.kind, one.source) for key, one in constants.items()}
    return Cluster(name=name, gpus_per_node=gpus, origins=origins, **values)


class _Constant(NamedTuple):
    """A constant of the cluster and where it comes from."""

    value: float
    kind: Kind
    source: str


def _compute_constants(
    load: StageLoad, precision: Precision, seen: Measurements, source: str
) -> dict[str, _Constant]:
    """Peak, efficiency and memory bandwidth, and the number of devices that shared them."""
    mbs = seen.microbatches * seen.microbatch_size
    moved = mbs * (3 * load.moved + load.again_moved) / seen.copy_bandwidth
    beside = seen.microbatches * _size_independent_seconds(seen) + moved
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
    return {
        f"peak_{precision}": _Constant(peak, "measured", "square matrix products"),
        "efficiency": _Constant(reached / peak, "fitted", f"{source}: its compute"),
        "memory_bandwidth": _Constant(seen.copy_bandwidth, "measured", "a copy, all ranks at once"),
        "gpus_per_node": _Constant(seen.ranks, "measured", "ranks of this run"),
        **_weight_constants(load, seen, reached, source),
    }


def _weight_constants(
    load: StageLoad, seen: Measurements, rate: float, source: str
) -> dict[str, _Constant]:
    """How much longer weight gradients take than other products, which reach `rate` flop/s.

    On a busy machine the pass over the weights may be measured as longer than all of them.
    """
    passed = seen.microbatches * _size_independent_seconds(seen) / 3
    flops = seen.microbatches * seen.microbatch_size * load.weight_flops
    if not seen.weight_seconds or not flops:
        return {}
    share = max(LEAST_SHARE, (seen.weight_seconds - passed) * rate / flops)
    return {"weight_share": _Constant(share, "fitted", f"{source}, with split backwards")}


def _message_constants(seen: Measurements) -> dict[str, _Constant]:
    """Latency and bandwidth of messages; between nodes they are assumed to be the same."""
    latency, bandwidth = 0.0, seen.copy_bandwidth
    kind: Kind = "assumed"
    how = "as a copy: only one rank was there"
    if seen.messages:
        latency, rate = _line(seen.messages)
        bandwidth = 2 * rate  # one message takes the sender's time and the receiver's
        how, kind = "ping-pong of two ranks", "measured"
    return {
        "intra_node_bandwidth": _Constant(bandwidth, kind, how),
        "intra_node_latency": _Constant(latency, kind, how),
        "inter_node_bandwidth": _Constant(
            bandwidth, "assumed", "as within a node: one node was measured"
        ),
        "inter_node_latency": _Constant(latency, "assumed", "as within a node"),
    }


def _ring_constants(seen: Measurements) -> dict[str, _Constant]:
    """Bandwidth and latency of all-reduces; the network is assumed to be as fast as the node."""
    latency, bandwidth = 0.0, seen.copy_bandwidth
    kind: Kind = "assumed"
    how = "as a copy: only one rank was there"
    if seen.all_reduces:
        hops = 2 * (seen.ranks - 1)
        alpha, rate = _line(seen.all_reduces)
        latency, bandwidth = alpha / hops, rate * hops / seen.ranks
        how, kind = f"all-reduces of {seen.ranks} ranks", "measured"
    return {
        "nic_bandwidth": _Constant(bandwidth, "assumed", "as the ring: one node was measured"),
        "nic_efficiency": _Constant(1.0, "assumed", "as the ring"),
        "ring_bandwidth": _Constant(bandwidth, kind, how),
        "ring_latency": _Constant(latency, kind, how),
    }


def _gradient_constants(load: StageLoad, seen: Measurements, source: str) -> dict[str, _Constant]:
    """The rates at which weights are passed over and gradients compressed, as far as measured."""
    found = {}
    passed = _size_independent_seconds(seen)
    if passed:
        found["weight_rate"] = _Constant(
            3 * load.trained / passed, "fitted", f"{source}: two microbatch sizes"
        )
    if seen.compress_seconds:
        rate = seen.microbatches * load.trained / seen.compress_seconds
        compression = _Constant(rate, "measured", f"{source}: its compression")
    else:
        compression = _Constant(2e8, "assumed", "the model was dense")
    return {**found, "compression_rate": compression}


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
