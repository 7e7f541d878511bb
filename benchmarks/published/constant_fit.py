"""Fits the few constants of a cluster that no datasheet tells to some of a file's rows.

Least squares of the logarithm of predicted over published, with what the cluster file says as a
starting belief: a constant that the rows say nothing about stays as it is, and one row cannot push
a constant to the end of its range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from axsparse.planner.cluster import Cluster


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
