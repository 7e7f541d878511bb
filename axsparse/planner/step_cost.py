"""Seconds of what a step is made of, from sizes and the constants of a cluster.

Per microbatch of `mbs` samples and stage, with a load's flops F (again: F', computed again
in the backward), bytes moved, φ trained weights, b bytes of output:

    forward     mbs · (F / (e · peak) + moved / memory bandwidth) + φ / ω
    backward    2 · forward + the same of what is computed again + compression
    compression φ / κ, if the model is pruned
    message     mbs · b / B_p, of the sender's time and of the receiver's

and once a step, for D replicas and n bytes of kept gradients:

    all-reduce  2 (D − 1) / D · n · rings / (η · bandwidth of a node) + 2 (D − 1) · α
    optimizer   bytes read and written / memory bandwidth

`rings` is how many data-parallel rings share the cards of a node: one for each stage that
stands on it, min(devices a node, G_inter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axsparse.planner.cluster import Cluster
from axsparse.planner.simulator import MessageCost
from axsparse.planner.workload import StageLoad, Workload, value_bytes
from axsparse.runtime.grid import Grid


@dataclass(frozen=True)
class StageSeconds:
    """Of one microbatch on one stage."""

    forward: float
    backward: float
    """Compression included."""
    compress: float


@dataclass(frozen=True)
class StepCosts:
    """All that a simulated step needs to know; any of it may be measured instead."""

    stages: Sequence[StageSeconds]
    messages: Sequence[float]
    """Bytes of a microbatch from each stage to the next."""
    all_reduce: Sequence[float]
    """Seconds of each stage."""
    optimizer: Sequence[float]


def step_costs(
    workload: Workload,
    loads: Sequence[StageLoad],
    cluster: Cluster,
    grid: Grid,
    microbatch_size: int,
) -> StepCosts:
    """The costs of a layout by the formulas above."""
    width = value_bytes(workload.precision)
    return StepCosts(
        stages=[stage_seconds(workload, load, cluster, microbatch_size) for load in loads],
        messages=[microbatch_size * load.outputs for load in loads[:-1]],
        all_reduce=[all_reduce_seconds(width * load.kept, cluster, grid) for load in loads],
        optimizer=[optimizer_seconds(load, cluster, width) for load in loads],
    )


def stage_seconds(
    workload: Workload, load: StageLoad, cluster: Cluster, microbatch_size: int
) -> StageSeconds:
    """A microbatch's forward and backward through one stage."""
    rate = cluster.efficiency * cluster.peak(workload.precision)
    forward = load.flops / rate + load.moved / cluster.memory_bandwidth
    again = load.again_flops / rate + load.again_moved / cluster.memory_bandwidth
    compress = load.trained / cluster.compression_rate if workload.is_pruned else 0.0
    passed = 0.0 if cluster.weight_rate is None else load.trained / cluster.weight_rate
    return StageSeconds(
        forward=microbatch_size * forward + passed,
        backward=microbatch_size * (2 * forward + again) + 2 * passed + compress,
        compress=compress,
    )


def edges(costs: StepCosts, cluster: Cluster, grid: Grid, replica: int) -> list[MessageCost]:
    """What joins the stages of one replica, by the nodes that its ranks stand on."""
    return [
        _edge(nbytes, cluster, within=cluster.node_of(first) == cluster.node_of(first + 1))
        for first, nbytes in enumerate(costs.messages, start=grid.rank(0, replica))
    ]


def _edge(nbytes: float, cluster: Cluster, *, within: bool) -> MessageCost:
    if within:
        return MessageCost(cluster.intra_node_latency, nbytes / cluster.intra_node_bandwidth)
    return MessageCost(cluster.inter_node_latency, nbytes / cluster.inter_node_bandwidth)


def all_reduce_seconds(nbytes: float, cluster: Cluster, grid: Grid) -> float:
    """Of one stage's column, while the others reduce theirs."""
    if grid.g_data == 1:
        return 0.0
    if grid.size <= cluster.gpus_per_node:
        rate = cluster.ring_bandwidth
    else:
        rings = min(cluster.gpus_per_node, grid.g_inter)
        rate = cluster.nic_efficiency * cluster.nic_bandwidth / rings
    hops = 2 * (grid.g_data - 1)
    return hops / grid.g_data * nbytes / rate + hops * cluster.ring_latency


def optimizer_seconds(load: StageLoad, cluster: Cluster, weight_bytes: int) -> float:
    """One pass: gradients and indices are read, masters and moments read and written, the kept
    weights written, of `weight_bytes` each. What is offloaded comes and goes meanwhile."""
    state = load.state
    values = state.master + state.optimizer + state.offloaded
    moved = state.gradient + state.index + 2 * values + weight_bytes * load.kept
    seconds = moved / cluster.memory_bandwidth
    if not state.offloaded:
        return seconds
    assert cluster.host_bandwidth is not None, "offloading was checked"
    return max(seconds, state.offloaded / cluster.host_bandwidth)
