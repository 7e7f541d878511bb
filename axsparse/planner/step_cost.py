"""The seconds of a step and its parts, from a stage's load and the constants of a cluster.

For each microbatch of `mbs` samples on a stage with F flops, bytes moved, φ trained weights and
b bytes of output:

    forward     mbs · (F / (e · peak) + traffic · moved / memory bandwidth) + φ / ω
    teacher     mbs · (F / (e · peak) + traffic · moved / memory bandwidth) of its layers, on top of
                each forward
    backward    2 · forward + the forward of the recomputed layers without φ / ω + compression
    weight      mbs · W / (e · peak) · τ + φ / ω + compression, with W flops of weight gradients:
                the part of the backward that a split one leaves for later
    compression φ / κ, if the model is pruned
    message     mbs · b / B_p, for which the sender and the receiver are each busy
    gather      (D − 1) / D · n / rate + (D − 1) · α, for n bytes of kept weights of D replicas,
                in all passes but a step's first forward and backward; GPUs compute meanwhile
    sum         2 (T − 1) / T · n / rate + 2 (T − 1) · α as a ring, on top, for each tensor of n
                bytes that the T tensor-parallel ranks of a stage sum. Where stages are on two
                nodes, the ranks' messages share the network cards.

Once a step, for D replicas and n bytes of kept gradients:

    all-reduce  2 (D − 1) / D · n / rate + 2 (D − 1) · α, as a ring; between nodes a ring has its
                share of a node's network cards: their rate over the number of rings on the node
    optimizer   bytes read and written / memory bandwidth

A step is then played: the pipelines of all replicas, all-reduce, optimizer. Without jitter replicas
differ only in which of their messages leave a node, so one replica of each kind is played: at most
as many as a node has devices. With jitter all replicas differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from axsparse.pipeline.policy import Schedule
from axsparse.pipeline.simulator import Durations, MessageCost, PipelineRun, simulate
from axsparse.planner.cluster import Cluster
from axsparse.planner.stage_memory import StageLoad, value_bytes
from axsparse.runtime.communication import Sums
from axsparse.runtime.grid import Grid

if TYPE_CHECKING:
    from axsparse.planner.profiled_model import ProfiledModel

KERNEL_BYTES = 4.3
"""Bytes that kernels read and write for each byte that a transformer's layer leaves behind or hands
on: `benchmarks/published/transformer.py` counts 4.1 to 4.9 times as many as `LayerInfo`, for
GPT-3 XL to 13B."""

PLAYED_REPLICAS = 4
"""Replicas that are simulated if there is jitter: enough to distinguish layouts."""


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of one microbatch on one stage."""

    forward: float
    backward: float
    compress: float
    weight: float = 0.0
    """The part of the backward that makes the gradients of weights which can wait, compression
    included."""
    forward_sums: float = 0.0
    """The part of the forward in which the tensor-parallel ranks of the stage sum."""
    backward_sums: float = 0.0


@dataclass(frozen=True)
class StepCosts:
    """The costs from which a step is simulated."""

    stages: Sequence[StageSeconds]
    messages: Sequence[float]
    """Bytes of a microbatch's message from each stage to the next."""
    all_reduce: Sequence[float]
    optimizer: Sequence[float]


def step_costs(
    model: ProfiledModel,
    loads: Sequence[StageLoad],
    cluster: Cluster,
    grid: Grid,
    microbatch_size: int,
    microbatches: int = 1,
) -> StepCosts:
    """The costs of a layout, by the formulas at the head of this file; each replica runs
    `microbatches` a step."""
    width = value_bytes(model.precision)
    reduced = [(load.sum_bytes or width) * load.kept for load in loads]
    return StepCosts(
        stages=[
            with_gather(
                stage_seconds(model, load, cluster, microbatch_size, grid.g_tensor),
                all_reduce_seconds(load.gathered, cluster, grid) / 2 if load.gathered else 0.0,
                cluster,
                microbatches,
            )
            for load in loads
        ],
        messages=[microbatch_size * load.outputs for load in loads[:-1]],
        all_reduce=[all_reduce_seconds(nbytes, cluster, grid) for nbytes in reduced],
        optimizer=[optimizer_seconds(load, cluster, width) for load in loads],
    )


def stage_seconds(
    model: ProfiledModel, load: StageLoad, cluster: Cluster, microbatch_size: int, g_tensor: int = 1
) -> StageSeconds:
    """The seconds of a microbatch's forward and backward through one stage of N tensor-parallel
    ranks."""
    rate = cluster.efficiency * cluster.peak(model.precision)
    # A cluster without `traffic` was fitted with the bytes that layers write.
    each = 1.0 if cluster.traffic is None else KERNEL_BYTES * cluster.traffic
    forward = load.flops / rate + each * load.moved / cluster.memory_bandwidth
    again = load.again_flops / rate + each * load.again_moved / cluster.memory_bandwidth
    taught = load.taught_flops / rate + each * load.taught_moved / cluster.memory_bandwidth
    compress = load.trained / cluster.compression_rate if model.is_pruned else 0.0
    passed = 0.0 if cluster.weight_rate is None else load.trained / cluster.weight_rate
    expand = load.expanded / cluster.memory_bandwidth
    backward = microbatch_size * (2 * forward + again) + 2 * passed + compress + expand
    share = 1.0 if cluster.weight_share is None else cluster.weight_share
    weight = microbatch_size * load.weight_flops / rate * share + passed + compress
    sums = [
        sum_seconds(each, cluster, microbatch_size, g_tensor)
        for each in (load.forward_sums, load.backward_sums)
    ]
    return StageSeconds(
        forward=microbatch_size * (forward + taught) + passed + expand + sums[0],
        backward=backward + sums[1],
        compress=compress,
        weight=min(weight, backward) if load.weight_flops else 0.0,
        forward_sums=sums[0],
        backward_sums=sums[1],
    )


def with_gather(
    stage: StageSeconds, gather: float, cluster: Cluster, microbatches: int
) -> StageSeconds:
    """The seconds of a stage whose weights are gathered in `gather` seconds, as a mean over a
    step's microbatches. A host that computes moves no message on."""
    often = gather * (microbatches - 1) / microbatches
    if cluster.is_of_hosts:
        forward, backward = stage.forward + often, stage.backward + often
    else:
        forward, backward = max(stage.forward, often), max(stage.backward, often)
    return replace(stage, forward=forward, backward=backward)


def sum_seconds(sums: Sums, cluster: Cluster, microbatch_size: int, g_tensor: int) -> float:
    """The seconds in which tensor-parallel ranks sum these tensors of a microbatch, as a ring."""
    if g_tensor == 1:
        return 0.0
    ring = group(g_tensor, 1, cluster.gpus_per_node)
    hops = 2 * (g_tensor - 1) * sums.count
    return sums.sent(microbatch_size) / _ring_rate(ring, cluster) + hops * _latency(ring, cluster)


def _latency(group: Group, cluster: Cluster) -> float:
    if group.within_node and cluster.node_ring_latency is not None:
        return cluster.node_ring_latency
    return cluster.ring_latency


def edges(costs: StepCosts, cluster: Cluster, grid: Grid, replica: int) -> list[MessageCost]:
    """The cost of a message between each two stages of a replica, within a node or between
    nodes."""
    found = []
    for stage, nbytes in enumerate(costs.messages):
        ranks = grid.rank(stage, replica), grid.rank(stage + 1, replica)
        latency, rate = cluster.inter_node_latency, cluster.inter_node_bandwidth
        if grid.g_tensor > 1:
            # A card sends and receives at once: of a transfer each side's time counts half.
            rate = min(rate, 2 * cluster.nic_bandwidth / grid.g_tensor)
        if cluster.node_of(ranks[0]) == cluster.node_of(ranks[1]):
            latency, rate = cluster.intra_node_latency, cluster.intra_node_bandwidth
        found.append(MessageCost(latency, nbytes / rate))
    return found


def all_reduce_seconds(nbytes: float, cluster: Cluster, grid: Grid) -> float:
    """The seconds in which the replicas of one stage reduce `nbytes`, as all other stages do."""
    return ring_seconds(
        nbytes, group(grid.g_data, grid.parallelism, cluster.gpus_per_node), cluster
    )


@dataclass(frozen=True)
class Group:
    """Ranks that exchange data with each other, such as the replicas of one stage."""

    size: int
    on_node: int
    """How many of its ranks stand on a node."""
    sharing: int
    """How many such groups have ranks on a node, and so share its network cards."""

    @property
    def within_node(self) -> bool:
        return self.on_node >= self.size


def group(size: int, stride: int, gpus_per_node: int) -> Group:
    """A group of ranks that are a stride apart; ranks fill one node after the other."""
    if size * stride <= gpus_per_node:
        return Group(size, size, 1)
    on_node = max(1, min(size - 1, gpus_per_node // stride))
    return Group(size, on_node, min(gpus_per_node, stride))


def ring_seconds(nbytes: float, group: Group, cluster: Cluster) -> float:
    """Seconds of an all-reduce over a group of ranks; a reduce-scatter or an all-gather of the same
    bytes takes half."""
    if group.size == 1:
        return 0.0
    hops = 2 * (group.size - 1)
    return hops / group.size * nbytes / _ring_rate(group, cluster) + hops * _latency(group, cluster)


def _ring_rate(group: Group, cluster: Cluster) -> float:
    """Bytes/s that a ring over a group moves on each device."""
    within = cluster.ring_bandwidth
    if cluster.peer_bandwidth is not None:
        # Without a switch, few devices have few links among them.
        within = min(within, (group.on_node - 1) * cluster.peer_bandwidth)
    if group.within_node:
        return within
    between = cluster.nic_efficiency * cluster.nic_bandwidth / group.sharing
    return min(between, within) if group.on_node > 1 else between


def optimizer_seconds(load: StageLoad, cluster: Cluster, weight_bytes: int) -> float:
    """The seconds of the optimizer on one stage: it reads gradients and indices once, reads and
    writes masters and moments, and writes the kept weights. Offloaded state moves meanwhile."""
    state = load.state
    values = state.master + state.optimizer + state.offloaded
    moved = state.gradient + state.index + 2 * values + weight_bytes * load.kept
    seconds = moved / cluster.memory_bandwidth
    if not state.offloaded:
        return seconds
    assert cluster.host_bandwidth is not None, "`check_offload` has passed"
    return max(seconds, state.offloaded / cluster.host_bandwidth)


STEP_PHASES = ("compute", "compress", "optimizer", "p2p", "bubble", "collective")
"""The phases of `observe.phases` that a simulated step has; they add up to the step."""


@dataclass(frozen=True)
class StepRun:
    """A simulated step of all ranks, in seconds."""

    seconds: float
    pipelines: dict[int, PipelineRun]
    phases: list[dict[str, float]]
    """The seconds of each phase, for each stage: the mean over the replicas that were played."""

    @property
    def mean_phases(self) -> dict[str, float]:
        return {name: fmean(stage[name] for stage in self.phases) for name in STEP_PHASES}


def simulate_step(
    costs: StepCosts, cluster: Cluster, grid: Grid, schedule: Schedule, microbatches: int
) -> StepRun:
    """Play one step of `microbatches` a replica.

    A stage reduces its gradients once all its replicas have finished their last backward, and the
    optimizer begins once all stages have reduced. Two schedules with the same microbatches see the
    same jitter.
    """
    played = list(range(min(grid.g_data, PLAYED_REPLICAS)))
    if not cluster.jitter:
        kinds: dict[tuple[MessageCost, ...], int] = {}
        for replica in range(min(grid.g_data, cluster.gpus_per_node)):
            kinds.setdefault(tuple(edges(costs, cluster, grid, replica)), replica)
        played = list(kinds.values())
    pipelines: dict[int, PipelineRun] = {}
    for replica in played:
        pipelines[replica] = simulate(
            lambda stage: schedule.policy(
                stage=stage, g_inter=grid.g_inter, microbatches=microbatches
            ),
            durations(
                costs.stages,
                microbatches,
                cluster.jitter,
                f"0 {replica}",
                is_split=schedule.split_backward,
                g_tensor=grid.g_tensor,
            ),
            edges(costs, cluster, grid, replica),
        )
    return joined_step(costs, pipelines, microbatches)


def joined_step(costs: StepCosts, pipelines: dict[int, PipelineRun], microbatches: int) -> StepRun:
    """A step from the pipelines of its replicas: the work after the last backward, and the
    phases."""
    runs = pipelines.values()
    reduced = max(
        max(run.stages[stage].end for run in runs) + costs.all_reduce[stage]
        for stage in range(len(costs.stages))
    )
    seconds = reduced + max(costs.optimizer)
    phases = []
    for stage, each in enumerate(costs.stages):
        busy = fmean(run.stages[stage].compute for run in runs)
        sums = microbatches * (each.forward_sums + each.backward_sums)
        without_jitter = microbatches * (each.forward + each.backward) - sums
        # Jitter lengthens compression like everything else.
        stretched = (busy - sums) / without_jitter if without_jitter > 0 else 1.0
        compress = microbatches * each.compress * stretched
        seconds_of = {
            "compute": busy - sums - compress,
            "compress": compress,
            "optimizer": costs.optimizer[stage],
            "p2p": fmean(run.stages[stage].p2p for run in runs),
            "collective": costs.all_reduce[stage] + sums,
        }
        bubble = max(0.0, seconds - sum(seconds_of.values()))
        phases.append({**seconds_of, "bubble": bubble})
    return StepRun(seconds, pipelines, phases)


def durations(
    stages: Sequence[StageSeconds],
    microbatches: int,
    jitter: float,
    key: str,
    *,
    is_split: bool = False,
    g_tensor: int = 1,
) -> Durations:
    """The seconds of every action, with jitter.

    Each is its cost times exp(σ N − σ² / 2), of mean 1, where N is standard normal and σ is
    `jitter`; `key` seeds the generator. The two parts of a split backward have one factor. Of the
    `g_tensor` tensor-parallel ranks of a stage all wait for the slowest.
    """
    chance = random.Random(key)  # noqa: S311 - delays, not secrets
    shift = jitter**2 / 2

    def factors() -> list[float]:
        if not jitter:
            return [1.0] * microbatches
        return [
            math.exp(jitter * max(chance.gauss(0.0, 1.0) for _ in range(g_tensor)) - shift)
            for _ in range(microbatches)
        ]

    forward = [
        [(each.forward - each.forward_sums) * factor + each.forward_sums for factor in factors()]
        for each in stages
    ]
    backward, weight = [], []
    for each in stages:
        later = each.weight if is_split else 0.0
        drawn = factors()
        sums = each.backward_sums
        backward.append([(each.backward - later - sums) * factor + sums for factor in drawn])
        weight.append([later * factor for factor in drawn])
    return Durations(forward, backward, weight if is_split else ())
