"""Compares predictions with a file of published runs: errors, and choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from axsparse.planner.cluster import Cluster
from published.piece_loads import transformer
from published.run_file import RunFile, RunRow
from published.run_memory import RunMemory, predict_memory
from published.run_step import predict_step


@dataclass(frozen=True)
class CheckedRow:
    """A published run and its prediction."""

    row: RunRow
    seconds: float
    memory: RunMemory
    fits: bool
    """The verdict: whether it fits the device's memory."""
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


@dataclass(frozen=True)
class Check:
    """All rows of a file against their predictions."""

    name: str
    source: str
    cluster: Cluster
    """With the constants of the file."""
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
    """Predict all rows, with the constants that the file has instead of the cluster's."""
    constants: dict[str, Any] = {**file.constants}
    cluster = replace(cluster, **constants)
    return Check(file.name, file.source, cluster, [checked(row, cluster) for row in file.rows])


def checked(row: RunRow, cluster: Cluster) -> CheckedRow:
    """A run and its prediction."""
    seconds = predict_step(row, cluster).seconds
    memory = predict_memory(row, cluster)
    predicted, published = rates(row, seconds)
    unit, _ = published_rate(row)
    return CheckedRow(
        row=row,
        seconds=seconds,
        memory=memory,
        fits=memory.fits(cluster),
        unit=unit,
        predicted=predicted,
        published=published,
    )


def published_rate(row: RunRow) -> tuple[str, float | None]:
    """The unit and the number by which a run is evaluated: the first that it has."""
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
class LayoutDecision:
    """Runs of one model with one batch on equally many devices, of which a planner chooses."""

    rows: Sequence[CheckedRow]
    """By predicted step, shortest first."""

    @property
    def place_of_best(self) -> int:
        """At which place of the prediction the best published layout is, counted from 1."""
        best = min(self.rows, key=lambda each: each.seconds + each.slower)
        return self.rows.index(best) + 1


def choices(rows: Sequence[CheckedRow]) -> list[LayoutDecision]:
    """The groups of rows that are alternatives."""
    groups: dict[object, list[CheckedRow]] = {}
    for each in rows:
        if each.published is None:
            continue
        training = (each.row.training.precision, each.row.training.sparsity)
        key = (each.row.model, each.row.batch.global_, each.row.devices, training)
        groups.setdefault(key, []).append(each)
    return [
        LayoutDecision(sorted(group, key=lambda each: each.seconds))
        for group in groups.values()
        if len(group) > 1
    ]
