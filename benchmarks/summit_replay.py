"""Replays the paper's study on Summit: Table II, the speedups, Figure 8, from five constants.

    python benchmarks/summit_replay.py [--json] [--save benchmarks/results/summit_replay.json]
    python benchmarks/summit_replay.py --fit     derive the constants anew (a minute of one core)

The constants are those of `axsparse/planner/clusters/summit.yaml`; `summit_study.py` says what
they were fitted to.
`--fit` also fits without Table II's column of 512 GPUs, which is then a prediction, and
fits the closed form of the same costs, M (τ + 4x) + (P − 1) (τ + 4x) + all-reduce, which
the simulation has to beat. The naive extrapolation is A / G + C through the two columns.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

from summit_study import (
    BREAKDOWN,
    BREAKDOWNS,
    CELLS,
    DEEPSPEED,
    FITTED,
    GPUS,
    METHODS,
    PUBLISHED,
    SAVINGS,
    TARGETS,
    closed_form,
    deepspeed_3d,
    fit,
    means,
    misfits,
    percent_of_peak,
    predict,
    simulated,
    stages,
    step,
)

from axsparse.planner.cluster import Cluster, load_cluster
from axsparse.planner.step_simulation import STEP_PHASES
from axsparse.runtime.grid import Grid


def fits(cluster: Cluster) -> tuple[Cluster, dict[str, Any]]:
    """The cluster with constants fitted anew; and what was found on the way."""
    held_out = [f for f in PUBLISHED if not (f.group == CELLS and f.gpus == 512)]
    rows: dict[str, Any] = {}
    fitted = cluster
    for name, timing in (("simulated", simulated), ("closed form", closed_form)):
        for which, figures in (("all figures", PUBLISHED), ("without 512 cells", held_out)):
            found = fit(timing, cluster, figures)
            misfit = misfits(predict(timing, found, PUBLISHED))
            rows[f"{name}, {which}"] = {
                "constants": {field: getattr(found, field) for field in FITTED},
                "mean_misfit": means(misfit),
                "cells_of_512": [misfit[f.key] for f in PUBLISHED if f not in held_out],
            }
            if timing is simulated and figures is PUBLISHED:
                fitted = found
            print(f"{name}, {which}: {json.dumps(rows[f'{name}, {which}'])}", flush=True)
    return fitted, rows


# -- baselines ------------------------------------------------------------------------------


def naive(method: str, gpus: int) -> float:
    """Percent of peak if a step takes A / G + C, through the cells of 256 and 512 GPUs."""
    cells = {f.gpus: f.value for f in PUBLISHED if f.group == CELLS and f.what == method}
    # In units in which a step at peak takes 1 / G.
    low, high = 100 / (cells[256] * 256), 100 / (cells[512] * 512)
    constant = 2 * high - low
    return 100 / (gpus * (512 * (high - constant) / gpus + constant))


def scaled(method: str) -> float:
    """What A / G alone makes of the cell of 512 GPUs, in percent of it: it has one point."""
    cells = {f.gpus: f.value for f in PUBLISHED if f.group == CELLS and f.what == method}
    return 100 * (cells[256] / cells[512] - 1)


def tensor_parallel(cluster: Cluster, gpus: int) -> dict[str, Any]:
    """DeepSpeed-3D of the 13B model: on as many devices a copy as AxoNN takes, and at its best.

    The study does not say its layouts. ZeRO lets a copy do with fewer devices, the more
    replicas there are; `bound` takes that freedom, the other row does not.
    """
    rows = {
        "as AxoNN": deepspeed_3d(cluster, "gpt3_13b", gpus, stages("gpt3_13b", 1.0)),
        "bound": deepspeed_3d(cluster, "gpt3_13b", gpus, None),
    }
    return {
        "published": DEEPSPEED[gpus],
        **{
            name: {
                "percent_of_peak": round(
                    percent_of_peak(row, cluster, simulated(row, cluster)["seconds"]), 2
                ),
                "tensor_parallel": row.layout.tensor,
                "grid": str(Grid(row.layout.pipeline, row.layout.data)),
            }
            for name, row in rows.items()
        },
    }


# -- report ---------------------------------------------------------------------------------


def results(cluster: Cluster) -> dict[str, Any]:
    """Every prediction, as the last line of --json has it and more."""
    known = cache(partial(step, simulated, cluster))
    speedups: dict[str, dict[str, float]] = {}
    for model, counts in GPUS.items():
        seconds = [[known(model, f, gpus).seconds for f in METHODS.values()] for gpus in counts]
        speedups[model] = {
            str(gpus): round(100 * (1 - sparse / dense), 2)
            for gpus, (dense, sparse) in zip(counts, seconds, strict=True)
        }
    predicted = predict(simulated, cluster, PUBLISHED)
    misfit = misfits(predicted)
    breakdown: dict[str, dict[str, Any]] = {}
    for gpus in SAVINGS:
        dense = known(BREAKDOWN, 1.0, gpus).seconds
        breakdown[str(gpus)] = {
            "saved": {
                f.what: round(predicted[f.key], 2)
                for f in PUBLISHED
                if f.group == BREAKDOWNS and f.gpus == gpus
            },
            **{
                method: {
                    phase: round(100 * known(BREAKDOWN, density, gpus).phases[phase] / dense, 2)
                    for phase in STEP_PHASES
                }
                for method, density in METHODS.items()
            },
        }
    return {
        "percent_of_peak": {
            method: {
                str(gpus): round(known("gpt3_13b", density, gpus).percent, 2)
                for gpus in GPUS["gpt3_13b"]
            }
            for method, density in METHODS.items()
        },
        "speedup_percent": speedups,
        "figure8": breakdown,
        "constants": {
            name: {"value": getattr(cluster, name), "kind": origin.kind}
            for name, origin in cluster.origins.items()
        },
        "g_inter": {
            model: {method: stages(model, density) for method, density in METHODS.items()}
            for model in GPUS
        },
        "misfit": {key: round(value, 2) for key, value in misfit.items()},
        "mean_misfit": {group: round(value, 2) for group, value in means(misfit).items()},
        "naive_percent_of_peak": {
            method: {str(gpus): round(naive(method, gpus), 2) for gpus in GPUS["gpt3_13b"]}
            for method in METHODS
        },
        "one_point_misfit_of_512": {method: round(scaled(method), 2) for method in METHODS},
        "deepspeed_3d": {str(gpus): tensor_parallel(cluster, gpus) for gpus in DEEPSPEED},
    }


def show(found: Mapping[str, Any]) -> None:
    """The report, for people."""
    print("constants of summit.yaml:")
    for name, entry in found["constants"].items():
        print(f"  {name:22} {entry['value']:<12.5g} {entry['kind']}")
    print("misfit (percent of a cell; points of speedups and savings):")
    for key, value in found["misfit"].items():
        print(f"  {key:52} {value:+.2f}")
    for group, value in found["mean_misfit"].items():
        print(f"  mean, {group}: {value:.2f} (target {TARGETS[group]})")
    print("GPT-3 13B, percent of peak on", *GPUS["gpt3_13b"])
    for method in METHODS:
        for name in ("percent_of_peak", "naive_percent_of_peak"):
            print(f"  {method:12} {name:22}", *found[name][method].values())
    print("512 GPUs from 256 alone by A / G:", found["one_point_misfit_of_512"])
    for gpus, rows in found["deepspeed_3d"].items():
        print(f"DeepSpeed-3D-like on {gpus}:", json.dumps(rows))
    print("speedups:", json.dumps(found["speedup_percent"]))


def main() -> None:
    """Replay, and fit if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--fit", action="store_true", help="derive the constants anew")
    parser.add_argument("--save", type=Path)
    arguments = parser.parse_args()
    cluster = load_cluster("summit")
    extra = {}
    if arguments.fit:
        cluster, extra["fits"] = fits(cluster)
    found = results(cluster)
    show(found)
    if arguments.save:
        before = json.loads(arguments.save.read_text()) if arguments.save.exists() else {}
        kept = {"fits": before["fits"]} if "fits" in before else {}
        arguments.save.write_text(json.dumps({**found, **kept, **extra}, indent=1) + "\n")
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
