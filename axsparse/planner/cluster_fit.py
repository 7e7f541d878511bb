"""From what was measured on a machine to the constants of its cluster file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from axsparse.planner.cluster import Cluster, Kind, Origin, Precision
from axsparse.planner.stage_memory import SMALL_BLOCKS
from axsparse.planner.workload import StageLoad
from axsparse.runtime.errors import TrainingError


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What a calibration saw: bytes, seconds, flop/s; means over ranks of medians."""

    ranks: int
    """Of one node, all at work at once."""
    memory_bytes: float
    """That the host leaves to each."""
    overhead_bytes: float
    """Held beside model state before the first step."""
    peak: float
    """Flop/s of a square matrix product."""
    copy_bandwidth: float
    """Bytes read and written by a copy, each second."""
    compute_seconds: float
    """Of the forwards and backwards of a step in one stage, compression left out."""
    compute_of_other: tuple[int, float] | None
    """Another microbatch size, and the seconds of as many microbatches of it; None: of this size
    only."""
    compress_seconds: float
    microbatches: int
    microbatch_size: int
    forwards: Sequence[float]
    """Seconds of single forwards, for jitter."""
    messages: Sequence[tuple[float, float]]
    """Bytes, and seconds from the call of the sender to the arrival; empty with one rank."""
    all_reduces: Sequence[tuple[float, float]]
    """Bytes and seconds; empty with one rank."""


def fitted(
    name: str, load: StageLoad, precision: Precision, seen: Measurements, source: str
) -> Cluster:
    """The cluster by which the formulas of `cost` give what was measured.

    TrainingError if the model took less time than moving its activations does.
    """
    passed = _passed(seen)
    mbs = seen.microbatches * seen.microbatch_size
    moved = mbs * (3 * load.moved + load.again_moved) / seen.copy_bandwidth
    beside = seen.microbatches * passed + moved
    arithmetic = seen.compute_seconds - beside
    if arithmetic <= 0:
        raise TrainingError(
            f"calibrate: forwards and backwards took {seen.compute_seconds:.3g} s, less than the "
            f"{beside:.3g} s that moving weights and activations takes; take a larger model, whose "
            "activations do not stay in caches"
        )
    reached = mbs * (3 * load.flops + load.again_flops) / arithmetic
    # A product of another shape may be faster than the one that was timed.
    peak = max(seen.peak, reached)
    values: dict[str, tuple[float, Origin]] = {}

    def put(key: str, value: float, kind: Kind, text: str) -> None:
        values[key] = (value, Origin(kind, text))

    put("memory_bytes", seen.memory_bytes, "measured", f"memory of the host / {seen.ranks} ranks")
    put(f"peak_{precision}", peak, "measured", "square matrix products")
    put("efficiency", reached / peak, "fitted", f"{source}: its compute")
    put("memory_bandwidth", seen.copy_bandwidth, "measured", "a copy, all ranks at once")
    put("gpus_per_node", seen.ranks, "measured", "ranks of this run")
    latency, rate = _line(seen.messages)
    half = 2 * rate  # the sender's time and the receiver's
    how = "ping-pong of two ranks" if seen.messages else "as a copy: only one rank was there"
    kind: Kind = "measured" if seen.messages else "assumed"
    bandwidth = half if seen.messages else seen.copy_bandwidth
    put("intra_node_bandwidth", bandwidth, kind, how)
    put("intra_node_latency", latency, kind, how)
    put("inter_node_bandwidth", bandwidth, "assumed", "as within a node: one node was measured")
    put("inter_node_latency", latency, "assumed", "as within a node")
    hops = 2 * (seen.ranks - 1)
    alpha, ring = _line(seen.all_reduces)
    if seen.all_reduces:
        ring, alpha = ring * hops / seen.ranks, alpha / hops
        how, kind = f"all-reduces of {seen.ranks} ranks", "measured"
    else:
        ring, how, kind = seen.copy_bandwidth, "as a copy: only one rank was there", "assumed"
    put("nic_bandwidth", ring, "assumed", "as the ring: one node was measured")
    put("nic_efficiency", 1.0, "assumed", "as the ring")
    put("ring_bandwidth", ring, kind, how)
    put("ring_latency", alpha, kind, how)
    if passed:
        put("weight_rate", 3 * load.trained / passed, "fitted", f"{source}: two microbatch sizes")
    if seen.compress_seconds:
        rate = seen.microbatches * load.trained / seen.compress_seconds
        put("compression_rate", rate, "measured", f"{source}: its compression")
    else:
        put("compression_rate", 2e8, "assumed", "the model was dense")
    overhead = seen.overhead_bytes + SMALL_BLOCKS
    small = f"{SMALL_BLOCKS / 1e6:.0f} MB"
    put("overhead_bytes", overhead, "measured", f"resident beside model state, and {small} later")
    put("jitter", spread(seen.forwards), "measured", "sigma of the logarithm of single forwards")
    constants = {key: value for key, (value, _) in values.items()}
    gpus = int(constants.pop("gpus_per_node"))
    origins = {key: origin for key, (_, origin) in values.items()}
    return Cluster(name=name, gpus_per_node=gpus, origins=origins, **constants)


def _passed(seen: Measurements) -> float:
    """Seconds of a microbatch's forward and backward that do not depend on its size."""
    if seen.compute_of_other is None:
        return 0.0
    other, seconds = seen.compute_of_other
    size = seen.microbatch_size
    found = (other * seen.compute_seconds - size * seconds) / (other - size) / seen.microbatches
    return max(0.0, found)


def spread(seconds: Sequence[float]) -> float:
    """σ of the logarithms, without the slowest tenth: those were interrupted by others."""
    kept = sorted(seconds)[: max(2, math.ceil(0.9 * len(seconds)))]
    return stdev(map(math.log, kept)) if len(kept) > 1 else 0.0


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency and rate of `seconds = latency + bytes / rate`, by least squares of relative
    errors, with both at least 0; (0, 0) without points."""
    if not points:
        return 0.0, 0.0
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
