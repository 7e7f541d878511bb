"""Simulates a step: the pipelines of all replicas, all-reduce, optimizer, and its phases.

Without jitter replicas differ only in which of their messages leave a node, so one replica of
each kind is played: at most as many as a node has devices. With jitter all replicas differ.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from axsparse.pipeline.schedules import Schedule
from axsparse.pipeline.simulator import Durations, MessageCost, PipelineRun, simulate
from axsparse.planner.cluster import Cluster
from axsparse.planner.step_cost import StageSeconds, StepCosts, edges
from axsparse.runtime.grid import Grid

STEP_PHASES = ("compute", "compress", "optimizer", "p2p", "bubble", "collective")
"""The phases of `observe.phases` that a simulated step has; they add up to the step."""


@dataclass(frozen=True)
class StepRun:
    """A simulated step of all ranks, in seconds."""

    seconds: float
    pipelines: dict[int, PipelineRun]
    """The replicas that were played, by their number."""
    phases: list[dict[str, float]]
    """The seconds of each phase, for each stage: the mean over the replicas that were played."""

    @property
    def mean_phases(self) -> dict[str, float]:
        """The seconds of each phase: the mean over stages."""
        return {name: fmean(stage[name] for stage in self.phases) for name in STEP_PHASES}


def simulate_step(
    costs: StepCosts,
    cluster: Cluster,
    grid: Grid,
    schedule: Schedule,
    microbatches: int,
    *,
    most_replicas: int | None = None,
) -> StepRun:
    """Play one step of `microbatches` a replica.

    A stage reduces its gradients once all its replicas have finished their last backward. The
    norm of all gradients comes before any update, so the optimizer begins once all stages have
    reduced. Jitter depends on the replica alone: two schedules with the same microbatches see
    the same delays. `most_replicas` bounds how many replicas are played with jitter; they are a
    sample then, and the slowest of a sample is faster than the slowest of all.
    """
    pipelines: dict[int, PipelineRun] = {}
    for replica in _played(costs, cluster, grid, most_replicas):
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
        phases.append({**seconds_of, "bubble": seconds - sum(seconds_of.values())})
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
    `jitter`. `key` seeds the generator. The two parts of a split backward have one factor, so that
    splitting makes delays neither longer nor shorter. Each of the `g_tensor`, the tensor-parallel
    ranks of a stage, has its own factors; their sums let all of them wait for the slowest, and take
    no longer by themselves.
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


def _played(costs: StepCosts, cluster: Cluster, grid: Grid, most_replicas: int | None) -> list[int]:
    """The numbers of the replicas that are played."""
    if cluster.jitter:
        return list(range(min(grid.g_data, most_replicas or grid.g_data)))
    kinds: dict[tuple[MessageCost, ...], int] = {}
    for replica in range(min(grid.g_data, cluster.gpus_per_node)):
        kinds.setdefault(tuple(edges(costs, cluster, grid, replica)), replica)
    return list(kinds.values())
