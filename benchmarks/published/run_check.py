"""Holds predictions against a file of published runs: errors, and what would explain a miss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from axsparse.planner.cluster import Cluster
from published.piece_loads import transformer
from published.run_file import RunFile, RunRow
from published.run_memory import RunMemory, predict_memory
from published.run_step import placement, predict_step, tensor_share

DOUBTS: Mapping[str, float] = {
    "compute": 0.1,
    "compress": 0.3,
    "tensor": 0.3,
    "optimizer": 0.5,
    "p2p": 0.5,
    "collective": 0.3,
}
"""How far the prediction of each phase is usually off, as a fraction. The bubble has none of its
own: it follows from the others."""


@dataclass(frozen=True)
class CheckedRow:
    """A published run and its prediction."""

    row: RunRow
    seconds: float
    phases: Mapping[str, float]
    """Seconds of each phase, the mean over stages; `tensor` are the all-reduces within layers."""
    memory: RunMemory
    fits: bool
    """The verdict: whether it fits the device's memory."""
    tensor_leaves_node: bool
    """Whether a layer is shared by devices of several nodes."""
    unit: str
    """Of `predicted` and `published`; empty if the run has no time."""
    predicted: float
    published: float | None

    @property
    def error(self) -> float | None:
        """Predicted over published, less 1."""
        return None if self.published is None else self.predicted / self.published - 1

    @property
    def memory_error(self) -> float | None:
        known = self.row.published.memory_gb
        return None if known is None else self.memory.total / 1e9 / known - 1

    @property
    def slower(self) -> float:
        """By how many seconds the published step is longer than the predicted one."""
        if self.published is None:
            return 0.0
        ratio = self.published / self.predicted
        return self.seconds * ((ratio if self.unit == "s/step" else 1 / ratio) - 1)

    @property
    def explanation(self) -> str:
        """The phase that would explain the miss with least violence, and how."""
        missing = self.slower
        able = [
            (abs(missing) / (doubt * self.phases[name]), name)
            for name, doubt in DOUBTS.items()
            if self.phases[name] > 0 and self.phases[name] + missing > 0
        ]
        if not able:
            return "none alone"
        _, name = min(able)
        where = " (between nodes)" if name == "tensor" and self.tensor_leaves_node else ""
        return f"{name}{where} × {1 + missing / self.phases[name]:.2f}"


@dataclass(frozen=True)
class Check:
    """All rows of a file against their predictions."""

    name: str
    source: str
    cluster: Cluster
    """With the constants that were fitted."""
    fitted: Sequence[FittedConstant]
    """Empty if no row is marked to be fitted."""
    rows: Sequence[CheckedRow]

    @property
    def predicted(self) -> list[CheckedRow]:
        """The rows with a time that no constant was fitted to."""
        return [each for each in self.rows if not each.row.fit and each.error is not None]

    @property
    def mean(self) -> float | None:
        """The mean of the absolute errors of predicted rows."""
        errors = [abs(each.error or 0.0) for each in self.predicted]
        return fmean(errors) if errors else None

    @property
    def worst(self) -> float | None:
        return max((abs(each.error or 0.0) for each in self.predicted), default=None)

    @property
    def memory_worst(self) -> float | None:
        errors = [each.memory_error for each in self.rows]
        return max((abs(error) for error in errors if error is not None), default=None)


def check_runs(file: RunFile, cluster: Cluster) -> Check:
    """Fit what rows are marked for, and predict all rows."""
    to_fit = [row for row in file.rows if row.fit and published_rate(row)[1] is not None]
    fitted: list[FittedConstant] = []
    if to_fit:

        def errors(tried: Cluster) -> list[float]:
            found = []
            for row in to_fit:
                predicted, published = rates(row, predict_step(row, tried).seconds)
                assert published is not None, "rows without a time are left out"
                found.append(math.log(predicted / published))
            return found

        cluster, fitted = fit_constants(cluster, errors)
    rows = [checked(row, cluster) for row in file.rows]
    return Check(file.name, file.source, cluster, fitted, rows)


def checked(row: RunRow, cluster: Cluster) -> CheckedRow:
    """A run and its prediction."""
    run = predict_step(row, cluster)
    memory = predict_memory(row, cluster)
    phases = dict(run.mean_phases)
    phases["tensor"] = min(phases["compute"], tensor_share(row, cluster))
    phases["compute"] -= phases["tensor"]
    predicted, published = rates(row, run.seconds)
    unit, _ = published_rate(row)
    return CheckedRow(
        row=row,
        seconds=run.seconds,
        phases=phases,
        memory=memory,
        fits=memory.fits(cluster),
        tensor_leaves_node=not placement(row, cluster).tensor_group.within_node,
        unit=unit,
        predicted=predicted,
        published=published,
    )


def published_rate(row: RunRow) -> tuple[str, float | None]:
    """The unit and the number by which a run is judged: the first that it has."""
    known = row.published
    for unit, value in (
        ("s/step", known.seconds_per_step),
        ("samples/s", known.samples_per_second),
        ("tokens/s/GPU", known.tokens_per_second_per_gpu),
        ("TFLOP/s/GPU", known.tflops_per_gpu),
    ):
        if value is not None:
            return unit, value
    return "s/step", None


def rates(row: RunRow, seconds: float) -> tuple[float, float | None]:
    """A step of so many seconds in the unit of the published number, and that number."""
    unit, published = published_rate(row)
    samples = row.batch.global_
    if unit == "s/step":
        return seconds, published
    if unit == "samples/s":
        return samples / seconds, published
    if unit == "tokens/s/GPU":
        return samples * row.model.sequence_length / seconds / row.devices, published
    model = transformer(row, fused=False)
    counted = row.published.flops or ("megatron" if row.training.recompute == "full" else "model")
    flops = model.megatron_flops if counted == "megatron" else model.model_flops
    return samples * flops / seconds / row.devices / 1e12, published


@dataclass(frozen=True)
class Choice:
    """Runs of one model with one batch on equally many devices, of which a planner chooses."""

    rows: Sequence[CheckedRow]
    """By predicted step, shortest first."""

    @property
    def place_of_best(self) -> int:
        """At which place of the prediction the best published layout is, counted from 1."""
        best = min(self.rows, key=lambda each: each.seconds + each.slower)
        return self.rows.index(best) + 1


def choices(rows: Sequence[CheckedRow]) -> list[Choice]:
    """The groups of rows that are alternatives."""
    groups: dict[object, list[CheckedRow]] = {}
    for each in rows:
        if each.published is None:
            continue
        training = (each.row.training.precision, each.row.training.sparsity)
        key = (each.row.model, each.row.batch.global_, each.row.devices, training)
        groups.setdefault(key, []).append(each)
    return [
        Choice(sorted(group, key=lambda each: each.seconds))
        for group in groups.values()
        if len(group) > 1
    ]


@dataclass(frozen=True)
class Fittable:
    """A constant that may be fitted."""

    least: float
    most: float
    doubt: float
    """Standard deviation of the logarithm of what a cluster file says."""


FITTABLE: Mapping[str, Fittable] = {
    "efficiency": Fittable(0.2, 0.98, 0.2),
    "traffic": Fittable(0.4, 4.0, 0.3),
    "nic_efficiency": Fittable(0.2, 1.0, 0.2),
}
"""Fraction of the peak that matrix products reach, bytes that kernels move over those that are
counted, fraction of the network cards' rate that collectives reach."""
ROW_DOUBT = 0.02
"""Standard deviation of the logarithm of what a row was measured to take."""
STEP = 0.01
ROUNDS = 6


@dataclass(frozen=True)
class FittedConstant:
    """A constant after the fit."""

    name: str
    before: float
    value: float
    least: float
    most: float


Errors = Callable[[Cluster], Sequence[float]]
"""The logarithms of predicted over published of the rows to fit."""


def fit_constants(cluster: Cluster, errors: Errors) -> tuple[Cluster, list[FittedConstant]]:
    """The cluster with which the rows are met best, by Gauss and Newton's method."""
    # A constant that is 0 or absent is no part of the cluster's model.
    names = [name for name in FITTABLE if getattr(cluster, name)]
    start = {name: math.log(getattr(cluster, name)) for name in names}
    at = dict(start)
    for _ in range(ROUNDS):
        here = list(errors(_with(cluster, at)))
        slopes = []
        for name in names:
            there = errors(_with(cluster, {**at, name: at[name] + STEP}))
            slopes.append([(b - a) / STEP for a, b in zip(here, there, strict=True)])
        moves = _solved(names, slopes, here, at, start)
        for name, move in zip(names, moves, strict=True):
            bounds = FITTABLE[name]
            wanted = at[name] + max(-0.3, min(0.3, move))
            at[name] = max(math.log(bounds.least), min(math.log(bounds.most), wanted))
        if max(map(abs, moves), default=0.0) < 1e-3:
            break
    found = _with(cluster, at)
    return found, [
        FittedConstant(
            name, getattr(cluster, name), getattr(found, name), bounds.least, bounds.most
        )
        for name in names
        for bounds in [FITTABLE[name]]
    ]


def _with(cluster: Cluster, logarithms: Mapping[str, float]) -> Cluster:
    values = {name: math.exp(value) for name, value in logarithms.items()}
    bounded: dict[str, Any] = {
        name: min(FITTABLE[name].most, value) for name, value in values.items()
    }
    return replace(cluster, **bounded)


def _solved(
    names: Sequence[str],
    slopes: Sequence[Sequence[float]],
    errors: Sequence[float],
    at: Mapping[str, float],
    start: Mapping[str, float],
) -> list[float]:
    """The moves that bring the linear model of errors and beliefs to its minimum."""
    weights = np.array([FITTABLE[name].doubt ** -2 for name in names])
    moved = np.array([at[name] - start[name] for name in names])
    slope = np.array(slopes).reshape(len(names), -1) / ROW_DOUBT
    matrix = slope @ slope.T + np.diag(weights)
    right = -slope @ (np.array(errors) / ROW_DOUBT) - weights * moved
    return [float(move) for move in np.linalg.solve(matrix, right)]
