"""The seconds of the parts of a step, from a stage's load and the constants of a cluster.

For each microbatch of `mbs` samples on a stage with F flops, bytes moved, φ trained weights and
b bytes of output:

    forward     mbs · (F / (e · peak) + traffic · moved / memory bandwidth) + φ / ω
    backward    2 · forward + the forward of the recomputed layers without φ / ω + compression
    weight      mbs · W / (e · peak) · τ + φ / ω + compression, with W flops of weight gradients:
                the part of the backward that a split one leaves for later
    compression φ / κ, if the model is pruned
    message     mbs · b / B_p, for which the sender and the receiver are each busy

Once a step, for D replicas and n bytes of kept gradients:

    all-reduce  see `collective_cost`: one ring for each stage on a node shares the node's cards
    optimizer   bytes read and written / memory bandwidth
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axsparse.pipeline.simulator import MessageCost
from axsparse.planner.cluster import Cluster
from axsparse.planner.collective_cost import NodePlacement, ring_seconds
from axsparse.planner.workload import StageLoad, Workload, value_bytes
from axsparse.runtime.grid import Grid

KERNEL_BYTES = 4.3
"""Bytes that kernels read and write for each byte that a transformer's layer leaves behind or hands
on: `benchmarks/published/transformer.py` counts 4.1 to 4.9 times what a survey counts, for GPT-3 XL
to 13B."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch on one stage."""

    forward: float
    backward: float
    """Compression included."""
    compress: float
    """The part of the backward that compresses gradients."""
    weight: float = 0.0
    """The part of the backward that makes the gradients of weights which can wait, compression
    included."""


@dataclass(frozen=True)
class StepCosts:
    """The costs from which a step is simulated; any of them may be measured instead."""

    stages: Sequence[StageSeconds]
    messages: Sequence[float]
    """Bytes of a microbatch's message from each stage to the next."""
    all_reduce: Sequence[float]
    """Seconds of each stage's all-reduce."""
    optimizer: Sequence[float]
    """Seconds of each stage's optimizer."""


def step_costs(
    workload: Workload,
    loads: Sequence[StageLoad],
    cluster: Cluster,
    grid: Grid,
    microbatch_size: int,
) -> StepCosts:
    """The costs of a layout, by the formulas at the head of this file."""
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
    """The seconds of a microbatch's forward and backward through one stage."""
    rate = cluster.efficiency * cluster.peak(workload.precision)
    # A cluster without `traffic` was fitted with the bytes that layers write.
    each = 1.0 if cluster.traffic is None else KERNEL_BYTES * cluster.traffic
    forward = load.flops / rate + each * load.moved / cluster.memory_bandwidth
    again = load.again_flops / rate + each * load.again_moved / cluster.memory_bandwidth
    compress = load.trained / cluster.compression_rate if workload.is_pruned else 0.0
    passed = 0.0 if cluster.weight_rate is None else load.trained / cluster.weight_rate
    backward = microbatch_size * (2 * forward + again) + 2 * passed + compress
    share = 1.0 if cluster.weight_share is None else cluster.weight_share
    weight = microbatch_size * load.weight_flops / rate * share + passed + compress
    return StageSeconds(
        forward=microbatch_size * forward + passed,
        backward=backward,
        compress=compress,
        weight=min(weight, backward) if load.weight_flops else 0.0,
    )


def edges(costs: StepCosts, cluster: Cluster, grid: Grid, replica: int) -> list[MessageCost]:
    """What a message costs between each two stages of a replica, within a node or between nodes."""
    return [
        _edge(nbytes, cluster, within=cluster.node_of(first) == cluster.node_of(first + 1))
        for first, nbytes in enumerate(costs.messages, start=grid.rank(0, replica))
    ]


def _edge(nbytes: float, cluster: Cluster, *, within: bool) -> MessageCost:
    if within:
        return MessageCost(cluster.intra_node_latency, nbytes / cluster.intra_node_bandwidth)
    return MessageCost(cluster.inter_node_latency, nbytes / cluster.inter_node_bandwidth)


def all_reduce_seconds(nbytes: float, cluster: Cluster, grid: Grid) -> float:
    """The seconds in which the replicas of one stage reduce `nbytes`, as all other stages do."""
    placed = NodePlacement(
        data=grid.g_data,
        tensor=1,
        pipeline=grid.g_inter,
        gpus_per_node=cluster.gpus_per_node,
        pipeline_first=True,
    )
    return ring_seconds(nbytes, placed.data_group, cluster)


def optimizer_seconds(load: StageLoad, cluster: Cluster, weight_bytes: int) -> float:
    """The seconds of the optimizer on one stage.

    It reads gradients and indices once, reads and writes masters and moments, and writes the kept
    weights of `weight_bytes` each. Offloaded state moves to the device and back at the same time.
    """
    state = load.state
    values = state.master + state.optimizer + state.offloaded
    moved = state.gradient + state.index + 2 * values + weight_bytes * load.kept
    seconds = moved / cluster.memory_bandwidth
    if not state.offloaded:
        return seconds
    assert cluster.host_bandwidth is not None, "`check_offload` has passed"
    return max(seconds, state.offloaded / cluster.host_bandwidth)
