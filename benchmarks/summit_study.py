"""The paper's study on Summit as data and predictions: published figures, layouts, the fit.

`summit_replay.py` is the command. Constants are fitted to `PUBLISHED` and to nothing else:
none belongs to a cell, a model or a method. Each layout is the smallest power of two of
stages whose memory fits, with microbatches of one sequence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import fmean
from typing import Any

from published.gpt_formula import GptFormula
from published.run_file import (
    ModelSizes,
    RunBatch,
    RunLayout,
    RunRow,
    RunTraining,
)
from published.run_memory import predict_memory
from published.run_step import predict_step, run_costs

from axsparse.config.load import load_config
from axsparse.config.model_config import GptConfig, of_family
from axsparse.pipeline.schedules import Schedule
from axsparse.planner.cluster import Cluster, load_cluster
from axsparse.planner.layout import Layout
from axsparse.runtime.grid import Grid

GPUS = {
    "gpt3_xl": (64, 128, 256, 512),
    "gpt3_2.7b": (64, 128, 256, 512),
    "gpt3_6.7b": (128, 256, 512, 1024),
    "gpt3_13b": (256, 512, 1024, 2048),
}
"""Table I."""
METHODS = {"AxoNN": 1.0, "AxoNN+SAMO": 0.1}
"""By density."""
BREAKDOWN = "gpt3_2.7b"
CELLS, SPEEDUPS, BREAKDOWNS = "percent of peak", "speedup", "figure 8"
TARGETS = {CELLS: 2.5, SPEEDUPS: 3.5, BREAKDOWNS: 3.0}
"""Mean misfit that is accepted: percent of the cell, points, points. Residuals count in these."""


@dataclass(frozen=True)
class Figure:
    """One published number."""

    group: str
    model: str
    gpus: int
    what: str
    """Method, or phase whose saving is stated."""
    value: float

    @property
    def key(self) -> str:
        return f"{self.group}: {self.model} on {self.gpus}, {self.what}"


SAVINGS = {
    128: {"p2p": 18.0, "collective": 6.0, "bubble": 9.0, "compute": -12.0},
    256: {"p2p": 16.17, "collective": 11.08, "bubble": 13.17, "compute": -10.18},
    512: {"p2p": 4.0, "collective": 21.0, "bubble": 15.0, "compute": -8.0},
}
PUBLISHED = [
    Figure(CELLS, "gpt3_13b", 256, "AxoNN", 43.3),
    Figure(CELLS, "gpt3_13b", 512, "AxoNN", 39.7),
    Figure(CELLS, "gpt3_13b", 256, "AxoNN+SAMO", 53.4),
    Figure(CELLS, "gpt3_13b", 512, "AxoNN+SAMO", 48.8),
    Figure(SPEEDUPS, "gpt3_xl", 64, "AxoNN+SAMO", 10.0),
    Figure(SPEEDUPS, "gpt3_xl", 512, "AxoNN+SAMO", 47.0),
    Figure(SPEEDUPS, "gpt3_2.7b", 64, "AxoNN+SAMO", 10.0),
    # The abstract and section VI-B say 34 at 512 GPUs, where a range says "10-24".
    Figure(SPEEDUPS, "gpt3_2.7b", 512, "AxoNN+SAMO", 34.0),
    *(
        Figure(BREAKDOWNS, BREAKDOWN, gpus, phase, saved)
        for gpus, savings in SAVINGS.items()
        for phase, saved in savings.items()
    ),
]
"""Speedups are 1 − T(SAMO) / T(AxoNN); savings are percent of AxoNN's step."""
DEEPSPEED = {256: 44.6, 512: 39.9}
"""Table II's DeepSpeed-3D, which no constant was fitted to."""
FITTED = (
    "efficiency",
    "intra_node_bandwidth",
    "nic_efficiency",
    "ring_latency",
    "compression_rate",
)
"""e, B_p (the same between nodes), η, α and κ."""


@dataclass(frozen=True)
class Step:
    """A step of one layout."""

    seconds: float
    phases: Mapping[str, float]
    percent: float


@cache
def workload(model: str, density: float) -> GptFormula:
    """One of the study's models."""
    sizes = of_family(load_config(model).config.model, GptConfig)
    return GptFormula(
        name=model,
        layers=sizes.num_layers,
        hidden=sizes.hidden_size,
        heads=sizes.num_heads,
        sequence=sizes.sequence_length,
        vocabulary=sizes.vocab_size,
        density=density,
    )


@cache
def batch_size(model: str) -> int:
    size: int = load_config(model).config.batch.global_batch_size
    return size


def schedule(g_inter: int) -> Schedule:
    """AxoNN's: driven by messages, room for two pipelines' worth of microbatches."""
    return Schedule("message-driven", g_inter, "alternate")


@cache
def stages(model: str, density: float) -> int:
    """The smallest power of two that fits, whatever the batch."""
    cluster, load = load_cluster("summit"), workload(model, density)
    for g_inter in (1 << power for power in range(8)):
        loads = load.stages(g_inter, 1)
        assert loads is not None
        layout = Layout(Grid(g_inter, 1), schedule(g_inter), 1, batch_size(model))
        memory = layout.memory(loads, cluster.overhead_bytes)
        if all(stage.total <= cluster.memory_bytes for stage in memory):
            return g_inter
    raise AssertionError(f"{model} fits nowhere")


@cache
def run(model: str, density: float, gpus: int) -> RunRow:
    """One run of the study, with its memory's smallest power of two of stages."""
    g_inter = stages(model, density)
    training = RunTraining(
        precision="fp16",
        recompute="full",
        schedule="message-driven",
        slack=g_inter,
        sparsity=1 - density,
    )
    layout = RunLayout(data=gpus // g_inter, pipeline=g_inter, split="fractions")
    return described(model, layout, training)


def described(model: str, layout: RunLayout, training: RunTraining) -> RunRow:
    """One of the study's models in some layout, with microbatches of one sequence."""
    gpt = workload(model, 1.0)
    return RunRow(
        name=model,
        model=ModelSizes(
            num_layers=gpt.layers,
            hidden_size=gpt.hidden,
            num_heads=gpt.heads,
            vocab_size=gpt.vocabulary,
            sequence_length=gpt.sequence,
        ),
        layout=layout,
        batch=RunBatch.model_validate({"global": batch_size(model)}),
        training=training,
    )


def simulated(row: RunRow, cluster: Cluster) -> dict[str, Any]:
    """Seconds and phases by the simulator."""
    found = predict_step(row, cluster)
    return {"seconds": found.seconds, "phases": found.mean_phases}


def closed_form(row: RunRow, cluster: Cluster) -> dict[str, Any]:
    """Seconds and phases by (M + P − 1) (τ + 4x) + all-reduce + optimizer."""
    costs, microbatches = run_costs(row, cluster), row.microbatches
    x = costs.edges[0][0].handling if row.layout.pipeline > 1 else 0.0
    tau, compress = costs.forward[0][0] + costs.backward[0][0], costs.compress[0]
    phases = {
        "compute": microbatches * (tau - compress),
        "compress": microbatches * compress,
        "p2p": microbatches * 4 * x,
        "bubble": (row.layout.pipeline - 1) * (tau + 4 * x),
        "collective": costs.all_reduce[0],
        "optimizer": costs.optimizer[0],
    }
    return {"seconds": sum(phases.values()), "phases": phases}


Timing = Callable[[RunRow, Cluster], dict[str, Any]]


def step(timing: Timing, cluster: Cluster, model: str, density: float, gpus: int) -> Step:
    """One step of one method on so many GPUs."""
    row = run(model, density, gpus)
    found = timing(row, cluster)
    return Step(found["seconds"], found["phases"], percent_of_peak(row, cluster, found["seconds"]))


def percent_of_peak(row: RunRow, cluster: Cluster, seconds: float) -> float:
    """What the study reports, by the flops of Narayanan et al."""
    flops = row.batch.global_ * workload(row.name, 1.0).sample_flops
    return 100 * flops / (seconds * row.devices * cluster.peak("fp16"))


def deepspeed_3d(cluster: Cluster, model: str, gpus: int, devices: int | None) -> RunRow:
    """The fastest layout with tensor parallelism within a node, ZeRO-1 and 1F1B.

    `devices` is how many devices one copy of the model is spread over; None takes the fewest that
    fit, for each degree of tensor parallelism.
    """
    heads, found = workload(model, 1.0).heads, []
    for tensor in range(1, cluster.gpus_per_node + 1):
        if heads % tensor or cluster.gpus_per_node % tensor or gpus % tensor:
            continue
        for pipeline in (1 << power for power in range(7)):
            if gpus % (tensor * pipeline) or tensor * pipeline != (devices or tensor * pipeline):
                continue
            layout = RunLayout(
                data=gpus // tensor // pipeline,
                tensor=tensor,
                pipeline=pipeline,
                split="fractions",
                order="tensor-pipeline-data",
            )
            training = RunTraining(precision="fp16", recompute="full", zero=1)
            row = described(model, layout, training)
            if row.microbatches and predict_memory(row, cluster).fits(cluster):
                found.append(row)
                break
    return min(found, key=lambda row: predict_step(row, cluster).seconds)


def predict(timing: Timing, cluster: Cluster, figures: Sequence[Figure]) -> dict[str, float]:
    """What the model says for published figures, by key."""
    known = cache(partial(step, timing, cluster))
    found = {}
    for figure in figures:
        if figure.group == CELLS:
            found[figure.key] = known(figure.model, METHODS[figure.what], figure.gpus).percent
            continue
        dense, sparse = (known(figure.model, density, figure.gpus) for density in METHODS.values())
        if figure.group == SPEEDUPS:
            saved = dense.seconds - sparse.seconds
        else:
            # The paper's compute holds the compression; the optimizer is none of its phases.
            names = ("compute", "compress") if figure.what == "compute" else (figure.what,)
            saved = sum(dense.phases[name] - sparse.phases[name] for name in names)
        found[figure.key] = 100 * saved / dense.seconds
    return found


def misfits(predicted: Mapping[str, float]) -> dict[str, float]:
    """Predicted less published: percent of the figure for cells, else points."""
    return {
        figure.key: (predicted[figure.key] - figure.value)
        * (100 / figure.value if figure.group == CELLS else 1.0)
        for figure in PUBLISHED
        if figure.key in predicted
    }


def means(misfit: Mapping[str, float]) -> dict[str, float]:
    """Mean absolute misfit by group."""
    return {
        group: fmean(abs(value) for key, value in misfit.items() if key.startswith(group))
        for group in TARGETS
    }


# -- fit ------------------------------------------------------------------------------------


def with_constants(cluster: Cluster, logarithms: Sequence[float]) -> Cluster:
    """A cluster with other fitted constants; messages cost the same within and between nodes."""
    e, b_p, eta, alpha, kappa = map(math.exp, logarithms)
    return replace(
        cluster,
        efficiency=e,
        intra_node_bandwidth=b_p,
        inter_node_bandwidth=b_p,
        nic_efficiency=eta,
        ring_latency=alpha,
        compression_rate=kappa,
    )


def fit(timing: Timing, cluster: Cluster, figures: Sequence[Figure]) -> Cluster:
    """Least squares of the misfits in units of `TARGETS`, over the logarithms of `FITTED`."""

    def loss(logarithms: Sequence[float]) -> float:
        if math.exp(logarithms[0]) > 1 or math.exp(logarithms[2]) > 1:
            return math.inf
        misfit = misfits(predict(timing, with_constants(cluster, logarithms), figures))
        return sum((misfit[figure.key] / TARGETS[figure.group]) ** 2 for figure in figures)

    best = [math.log(value) for value in (0.7, 3e9, 0.7, 5e-5, 2.5e10)]
    for width in (0.3, 0.1, 0.05):
        best = nelder_mead(loss, best, width, steps=90)
    return with_constants(cluster, best)


def nelder_mead(
    loss: Callable[[Sequence[float]], float], start: Sequence[float], width: float, steps: int
) -> list[float]:
    """The best point of a simplex that walks downhill (Nelder and Mead, 1965)."""
    corners = [list(start)]
    for axis in range(len(start)):
        corner = list(start)
        corner[axis] += width
        corners.append(corner)
    simplex = sorted((loss(corner), corner) for corner in corners)
    for _ in range(steps):
        worst, corner = simplex[-1]
        centre = [fmean(axis) for axis in zip(*(c for _, c in simplex[:-1]), strict=True)]

        def moved(by: float, centre: list[float] = centre, corner: list[float] = corner) -> Any:
            point = [c + by * (w - c) for c, w in zip(centre, corner, strict=True)]
            return loss(point), point

        tried = moved(-1.0)
        if tried[0] < simplex[0][0]:
            tried = min(tried, moved(-2.0))
        elif tried[0] >= simplex[-2][0]:
            tried = min(tried, moved(-0.5 if tried[0] < worst else 0.5))
        if tried[0] < worst:
            simplex[-1] = tried
        else:
            lowest = simplex[0][1]
            simplex[1:] = [
                (loss(point), point)
                for _, c in simplex[1:]
                for point in [[(a + b) / 2 for a, b in zip(lowest, c, strict=True)]]
            ]
        simplex.sort()
    return simplex[0][1]
