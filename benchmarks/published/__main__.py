"""Predict runs that have been published, and say how far the predictions are off.

    cd benchmarks
    python -m published                      the bundled tables
    python -m published runs.yaml            a file like one of them (`run_file.py` has its keys)

Mean and worst are over rows to which no constant was fitted.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from axsparse.planner.cluster import Cluster, load_cluster
from axsparse.planner.plan_report import table
from axsparse.runtime.errors import AxsparseError
from published.piece_loads import transformer
from published.run_file import RunRow, bundled_tables, load_runs
from published.run_step import RunMemory, predict_memory, predict_step


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


def checked(row: RunRow, cluster: Cluster) -> CheckedRow:
    """A run and its prediction."""
    seconds = predict_step(row, cluster).seconds
    memory = predict_memory(row)
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
    model = transformer(row)
    counted = row.published.flops or ("megatron" if row.training.recompute == "full" else "model")
    flops = model.megatron_flops if counted == "megatron" else model.model_flops
    return samples * flops / seconds / row.devices / 1e12, published


def place_of_best(rows: Sequence[CheckedRow]) -> int:
    """At which place of the predicted order the best published layout is, counted from 1."""
    return rows.index(min(rows, key=lambda each: each.seconds + each.slower)) + 1


def choices(rows: Sequence[CheckedRow]) -> list[list[CheckedRow]]:
    """The groups of rows of one model with one batch on equally many devices, of which a planner
    chooses, each by predicted step, shortest first."""
    groups: dict[object, list[CheckedRow]] = {}
    for each in rows:
        if each.published is None:
            continue
        training = (each.row.training.precision, each.row.training.sparsity)
        key = (each.row.model, each.row.batch.global_, each.row.devices, training)
        groups.setdefault(key, []).append(each)
    return [
        sorted(group, key=lambda each: each.seconds) for group in groups.values() if len(group) > 1
    ]


def lines(check: Check) -> Iterator[str]:
    """One file as a table, and the choices."""
    yield f"{check.name} on {check.cluster.name}"
    if check.source:
        yield f"source: {check.source}"
    yield ""
    yield from table([_cells(each) for each in check.rows])
    yield ""
    yield _summary(check)
    for choice in choices(check.rows):
        yield (
            f"choice of {len(choice)}: {choice[0].row.name} is predicted best, the best published "
            f"is at place {place_of_best(choice)}"
        )


def scoreboard(checks: Sequence[Check]) -> Iterator[str]:
    """A line for each file."""
    yield from table([_score(check) for check in checks])


def _cells(each: CheckedRow) -> dict[str, str]:
    error, off = each.error, each.memory_error
    known = each.row.published
    mark = "fit" if each.row.fit else ""
    fits = "yes" if each.fits else "no"
    if known.fits is not None and known.fits != each.fits:
        fits += f" (published {'yes' if known.fits else 'no'})"
    return {
        "name": each.row.name,
        "unit": each.unit,
        "predicted": f"{each.predicted:.4g}",
        "published": "" if each.published is None else f"{each.published:.4g}",
        "error %": mark if error is None else f"{100 * error:+.1f}{' ' * bool(mark)}{mark}",
        "GB": f"{each.memory.total / 1e9:.1f}",
        "published GB": "" if known.memory_gb is None else f"{known.memory_gb:g}",
        "GB error %": "" if off is None else f"{100 * off:+.1f}",
        "fits": fits,
    }


def _summary(check: Check) -> str:
    if check.mean is None or check.worst is None:
        return "no row was predicted: all were fitted, or none has a time"
    text = (
        f"mean {100 * check.mean:.1f} %, worst {100 * check.worst:.1f} % of "
        f"{len(check.predicted)} predicted rows"
    )
    if check.memory_worst is not None:
        text += f"; memory within {100 * check.memory_worst:.1f} %"
    return text


def _score(check: Check) -> dict[str, str]:
    places = map(place_of_best, choices(check.rows))
    missed = [each for each in check.predicted if abs(each.error or 0.0) == check.worst]
    return {
        "table": check.name,
        "cluster": check.cluster.name,
        "fitted rows": str(sum(each.row.fit for each in check.rows)),
        "predicted rows": str(len(check.predicted)),
        "mean %": "" if check.mean is None else f"{100 * check.mean:.1f}",
        "worst %": "" if check.worst is None else f"{100 * check.worst:.1f}",
        "worst row": missed[0].row.name if missed else "",
        "GB worst %": "" if check.memory_worst is None else f"{100 * check.memory_worst:.1f}",
        "best is at": ", ".join(map(str, places)),
    }


def main() -> None:
    """Check the files, and print tables."""
    files = [Path(path) for path in sys.argv[1:]] or bundled_tables()
    try:
        checks = [checked_file(path) for path in files]
    except (AxsparseError, OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    for check in checks:
        print("\n".join(lines(check)) + "\n")
    print("\n".join(scoreboard(checks)))


def checked_file(path: Path) -> Check:
    """A file's runs against their predictions, with its constants instead of the cluster's."""
    file = load_runs(path)
    constants: dict[str, Any] = {str(name): value for name, value in file.constants.items()}
    cluster = replace(load_cluster(file.cluster), **constants)
    return Check(file.name, file.source, cluster, [checked(row, cluster) for row in file.rows])


if __name__ == "__main__":
    main()
