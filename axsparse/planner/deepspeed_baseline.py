"""Predicts the paper's GPTs under DeepSpeed-3D: tensor, pipeline and data parallelism, and ZeRO-1.

A cost model only, for comparison: axsparse cannot train this way. T devices of one node share
every layer. A block all-reduces its activations over them twice in the forward, twice when the
forward is recomputed, and twice in the backward (Shoeybi et al. 2019, section 3), 2 · mbs · s · h
bytes each time. Masters and moments are sharded over the replicas (Rajbhandari et al. 2020, P_os);
the schedule is 1F1B. A group of T devices is planned as one device that has 1/T of every layer and,
since T rings share the network cards of a node, 1/T of their bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

from axsparse.config.validate import counted
from axsparse.pipeline.schedules import Schedule
from axsparse.planner.cluster import Cluster, Precision
from axsparse.planner.gpt_formula import GptFormula
from axsparse.planner.layout_search import LayoutQuestion, Plan, Row, plan
from axsparse.planner.step_cost import StageSeconds, StepCosts, step_costs
from axsparse.planner.workload import Fits, StageLoad, Workload, value_bytes
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid
from axsparse.samo.state_bytes import StateBytes

REDUCES = 2
"""All-reduces in a block's forward; its recomputation and its backward have as many each."""


@dataclass(frozen=True)
class TensorParallel:
    """The share of a dense GPT that one of `degree` devices holds and computes."""

    gpt: GptFormula
    degree: int

    @property
    def name(self) -> str:
        return f"{self.gpt.name}, tensor-parallel over {self.degree}"

    @property
    def precision(self) -> Precision:
        return self.gpt.precision

    @property
    def is_pruned(self) -> bool:
        return False

    @property
    def sample_flops(self) -> float:
        return self.gpt.sample_flops / self.degree

    @property
    def most_stages(self) -> int:
        return self.gpt.most_stages

    def stages(
        self, g_inter: int, g_data: int, fits: Fits | None = None, *, microbatches: int = 1
    ) -> list[StageLoad] | None:
        whole = self.gpt.stages(g_inter, g_data, microbatches=microbatches)
        assert whole is not None, "there is no limit"
        loads = [self._part(load, g_data) for load in whole]
        if fits is not None and not all(map(fits, range(g_inter), loads)):
            return None
        return loads

    def _part(self, load: StageLoad, g_data: int) -> StageLoad:
        t = self.degree
        state = StateBytes(*(-(-part // t) for part in astuple(load.state)))
        width = value_bytes(self.precision) * self.gpt.sequence * self.gpt.hidden
        return replace(
            load,
            flops=load.flops / t,
            again_flops=load.again_flops / t,
            trained=load.trained // t,
            kept=load.kept // t,
            state=replace(
                state, master=-(-state.master // g_data), optimizer=-(-state.optimizer // g_data)
            ),
            # Every device has all of the norms, dropouts and inputs of both halves: 10 of 34 s·h.
            working=(load.working - 5 * width) / t + 5 * width,
            logits=load.logits / t,
        )


def deepspeed_3d(
    gpt: GptFormula,
    cluster: Cluster,
    gpus: int,
    global_batch_size: int,
    devices: int | None = None,
) -> Row:
    """The fastest layout over all tensor-parallel degrees within a node.

    `devices` is how many devices one copy of the model is spread over (degree × stages); None
    tries all. The grid of the result counts groups of devices that share their layers, not
    devices. ConfigError if nothing fits.
    """
    found: list[Row] = []
    for degree in range(1, cluster.gpus_per_node + 1):
        fair = gpt.heads % degree == 0 and cluster.gpus_per_node % degree == 0
        if not fair or gpus % degree or (devices or 0) % degree:
            continue
        stages = None if devices is None else [devices // degree]
        try:
            made = _plan(gpt, cluster, gpus, global_batch_size, degree, stages)
        except ConfigError:
            continue  # another degree may fit
        found.append(min(made.rows, key=lambda row: row.seconds))
    if not found:
        raise ConfigError(
            f"gpus: no tensor-parallel layout of {gpt.name} fits {counted(gpus, 'device')} of "
            f"{cluster.name}; take more devices"
        )
    return min(found, key=lambda row: row.seconds)


def _plan(
    gpt: GptFormula,
    cluster: Cluster,
    gpus: int,
    global_batch_size: int,
    degree: int,
    stages: Sequence[int] | None,
) -> Plan:
    """All layouts of one tensor-parallel degree."""
    groups = replace(
        cluster,
        gpus_per_node=cluster.gpus_per_node // degree,
        nic_bandwidth=cluster.nic_bandwidth / degree,
    )
    return plan(
        LayoutQuestion(
            workload=TensorParallel(gpt, degree),
            cluster=groups,
            gpus=gpus // degree,
            global_batch_size=global_batch_size,
            schedule=Schedule("1f1b", 0, "alternate"),
            g_inter=stages,
            microbatch_sizes=[1],
            costing=_costs,
        )
    )


def _costs(
    workload: Workload,
    loads: Sequence[StageLoad],
    cluster: Cluster,
    grid: Grid,
    microbatch_size: int,
) -> StepCosts:
    """The costs of a device's share, and of the all-reduces within its group."""
    assert isinstance(workload, TensorParallel)
    gpt, degree = workload.gpt, workload.degree
    costs = step_costs(workload, loads, cluster, grid, microbatch_size)
    nbytes = value_bytes(gpt.precision) * microbatch_size * gpt.sequence * gpt.hidden
    hops = 2 * (degree - 1)
    once = hops / degree * nbytes / cluster.ring_bandwidth + hops * cluster.ring_latency
    each = REDUCES * gpt.layers / grid.g_inter * once
    return replace(
        costs,
        stages=[
            StageSeconds(stage.forward + each, stage.backward + 2 * each, 0.0)
            for stage in costs.stages
        ],
    )
