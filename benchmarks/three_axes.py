"""Where members of a stage pay: plans of two axes beside three, published runs, and jitter.

    cd benchmarks
    python three_axes.py plans         64 and 512 devices of three clusters, two axes beside three
    python three_axes.py published     runs with tensor parallelism, predicted as plans predict them
    python three_axes.py jitter        what the slowest member of a group costs
    python three_axes.py               all of it, into results/three_axes.json

Published runs are those of the scoreboard with tensor parallelism, without interleaved pieces and
without the recomputation of attention alone, which axsparse does not have.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from published.run_check import check_runs, rates
from published.run_file import RunRow, bundled_tables, load_runs
from published.transformer import SCORE_BYTES

from axsparse.config.load import LoadedConfig, configure, load_config, made_in_python
from axsparse.pipeline.schedules import Schedule
from axsparse.planner.cluster import Cluster, load_cluster
from axsparse.planner.layout import Layout, Row, simulate_layout
from axsparse.planner.layout_search import Rejection, plan, split_layers
from axsparse.planner.plan_model import Subject, subject
from axsparse.planner.plan_report import because, table
from axsparse.planner.run_workload import run_question
from axsparse.planner.step_cost import (
    KERNEL_BYTES,
    step_costs,
)
from axsparse.planner.surveyed_model import SurveyedModel
from axsparse.planner.workload import StageLoad
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid

RESULTS = Path(__file__).parent / "results" / "three_axes.json"
CLUSTERS = ("dgx-h100", "selene-a100", "frontier-mi250x")
DEGREES = (1, 2, 4, 8)
BATCH = ["batch.global_batch_size=512", "batch.microbatch_size=1"]
SIZES = (1, 2)
"""Microbatch sizes that are tried."""
STAGES = (1, 2, 4, 8, 16, 32)
"""Numbers of stages that are tried; deeper pipelines take minutes to simulate."""
LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
QWEN_30B_A3B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
}
JITTERS = (0.0, 0.03, 0.1, 0.2)


def settings_of(model: str) -> LoadedConfig:
    """The configuration of one of the three models."""
    if model == "GPT-3 13B":
        return load_config("gpt3_13b.yaml", BATCH)
    config = configure(
        {
            "model": {"name": "hf", "hf": {"Llama 70B": LLAMA_70B}.get(model, QWEN_30B_A3B)},
            "data": {"sequence_length": 4096},
            "pipeline": {"checkpoint_activations": 1},
            "pruning": {"sparsity": 0.9},
            "precision": "bf16",
        },
        BATCH,
    )
    return made_in_python(config, model)


# -- plans --------------------------------------------------------------------------------------


def plans() -> Iterator[dict[str, Any]]:
    """Two axes beside three, for every model, cluster, method and number of devices."""
    for model in ("GPT-3 13B", "Llama 70B", "Qwen3 30B-A3B"):
        for name in CLUSTERS:
            cluster = load_cluster(name)
            asked = subject(settings_of(model), cluster)
            for devices in (64, 512):
                for method in ("dense", "samo"):
                    beside = [planned(asked, method, cluster, devices, m) for m in ([1], DEGREES)]
                    row = {"model": model, "cluster": name, "devices": devices, "method": method}
                    print(row, file=sys.stderr, flush=True)
                    yield {**row, "two axes": beside[0], "three axes": beside[1]}


def planned(
    asked: Subject, method: Any, cluster: Cluster, devices: int, members: Any
) -> dict[str, Any]:
    """The recommended and the fastest layout, or why there is none."""
    config, room = asked.loaded.config, asked.room(cluster)
    question = replace(
        run_question(asked.workload(method), cluster, config, devices, STAGES, room),
        microbatch_sizes=SIZES,
        members=members,
    )
    try:
        found = plan(question)
    except ConfigError as error:
        return {"refused": str(error)}
    fastest = min(found.rows, key=lambda row: row.seconds)
    refused = {r.g_tensor: r.reason for r in found.rejected if "layout.g_tensor" in r.reason}
    return {
        "recommended": layout_of(found.recommended),
        "because": because(found),
        "fastest": layout_of(fastest),
        "members refused": refused,
    }


def layout_of(row: Row) -> dict[str, Any]:
    grid = row.layout.grid
    return {
        "layout": [grid.g_inter, grid.g_tensor, grid.g_data],
        "microbatch_size": row.layout.microbatch_size,
        "seconds": round(row.seconds, 4),
        "gigabytes": round(row.most_bytes / 1e9, 2),
        "percent_of_peak": round(row.percent_of_peak, 1),
        "collective": round(row.run.mean_phases["collective"], 4),
        "bubble": round(row.run.mean_phases["bubble"], 4),
    }


# -- published runs -----------------------------------------------------------------------------


def published() -> Iterator[dict[str, Any]]:
    """Runs with tensor parallelism, by the scoreboard's formulas and as a plan counts them."""
    for path in bundled_tables():
        file = load_runs(path)
        if all(row.layout.tensor == 1 for row in file.rows):
            continue
        check = check_runs(file, load_cluster(file.cluster))
        for each in check.rows:
            row = each.row
            if row.layout.tensor == 1 or row.fit or each.published is None:
                continue
            said = {"table": path.stem, "run": row.name, "layout": layout_text(row)}
            known = {"unit": each.unit, "published": each.published}
            errors = {"formulas %": round(100 * (each.predicted / each.published - 1), 1)}
            why = why_not(row)
            if why:
                yield {**said, **known, **errors, "left out": why}
                continue
            predicted, _ = rates(row, seconds_by_plan(row, check.cluster))
            errors["plan %"] = round(100 * (predicted / each.published - 1), 1)
            yield {**said, **known, **errors}


def layout_text(row: RunRow) -> str:
    return f"{row.layout.pipeline} × {row.layout.tensor} × {row.layout.data}"


def why_not(row: RunRow) -> str:
    """What of a run plans do not have; empty if they have all of it."""
    if row.layout.chunks > 1 and row.layout.pipeline > 1:
        return "interleaved pieces"
    return "recomputation of attention alone" if row.training.recompute == "selective" else ""


def seconds_by_plan(row: RunRow, cluster: Cluster) -> float:
    """A step of a run under 1F1B, from the survey of axsparse's own GPT of its sizes."""
    sizes, layout = row.model, row.layout
    model = {
        "name": "gpt",
        **{key: getattr(sizes, key) for key in ("num_layers", "hidden_size", "num_heads")},
        **{key: getattr(sizes, key) for key in ("sequence_length", "vocab_size")},
    }
    batch = {"global_batch_size": row.batch.global_, "microbatch_size": row.batch.micro}
    settings = [
        *(f"model.{key}={value}" for key, value in model.items()),
        *(f"batch.{key}={value}" for key, value in batch.items()),
        *("precision=fp16", "samo.enabled=false", "samo.gradient=half"),
        f"pipeline.checkpoint_activations={int(row.training.recompute == 'full')}",
    ]
    workload = subject(load_config(None, settings), cluster).workload("dense")
    grid = Grid(layout.pipeline, layout.data, layout.tensor)
    asked = Layout(grid, Schedule("1f1b", 0, "alternate"), row.batch.micro, row.microbatches)
    loads = split_layers(workload.of_member(layout.tensor), asked, 0.0, math.inf)
    assert not isinstance(loads, Rejection), "memory has no limit"
    if not cluster.fused_attention:
        loads = [with_scores(load, row, workload) for load in loads]
    costs = step_costs(workload, loads, cluster, grid, row.batch.micro)
    return simulate_layout(costs, cluster, asked).seconds


def with_scores(load: StageLoad, row: RunRow, workload: SurveyedModel) -> StageLoad:
    """The load of software that stores attention scores, which no layer of axsparse does."""
    blocks = sum(workload.survey.layers[number].kind == "block" for number in load.numbers)
    scores = row.model.num_heads / row.layout.tensor * row.model.sequence_length**2
    moved = blocks * SCORE_BYTES * scores / KERNEL_BYTES
    again = moved if load.again_flops else 0.0
    return replace(load, moved=load.moved + moved, again_moved=load.again_moved + again)


# -- jitter -------------------------------------------------------------------------------------


def jitter() -> Iterator[dict[str, Any]]:
    """How much longer a step of GPT-3 13B takes under jitter, on 64 devices in eight replicas that
    are shared out over eight devices each: by stages, by members, by both."""
    cluster = load_cluster("dgx-h100")
    workload = subject(settings_of("GPT-3 13B"), cluster).workload("samo")
    for members in DEGREES:
        grid = Grid(8 // members, 8, members)
        asked = Layout(grid, Schedule("message-driven", 1, "alternate"), 1, 128)
        loads = split_layers(workload.of_member(members), asked, 0.0, math.inf)
        assert not isinstance(loads, Rejection), "memory has no limit"
        costs = step_costs(workload, loads, cluster, grid, 1)
        seconds = [
            simulate_layout(costs, replace(cluster, jitter=sigma), asked).seconds
            for sigma in JITTERS
        ]
        longer = [f"{100 * (each / seconds[0] - 1):.1f}" for each in seconds[1:]]
        names = [f"sigma {sigma:g}, %" for sigma in JITTERS[1:]]
        yield {
            "stages × members × replicas": f"{grid.g_inter} × {members} × {grid.g_data}",
            "without, s": f"{seconds[0]:.3f}",
            **dict(zip(names, longer, strict=True)),
        }


# -- the command --------------------------------------------------------------------------------


def rows_of(plans: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """The plans as lines of a table."""
    for each in plans:
        cells = {key: str(each[key]) for key in ("model", "cluster", "devices", "method")}
        for axes in ("two axes", "three axes"):
            found = each[axes]
            for kind in ("recommended", "fastest"):
                named = f"{axes}, {kind}"
                if "refused" in found:
                    cells[named] = "fits none"
                    continue
                row = found[kind]
                layout = " × ".join(map(str, row["layout"]))
                cells[named] = f"{layout}: {row['seconds']:.2f} s"
        yield cells


def main() -> None:
    """Run the parts that are named, print them as tables, and write all of them if none is."""
    parts = {"plans": plans, "published": published, "jitter": jitter}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=parts)
    asked = parser.parse_args().part
    results = {name: list(part()) for name, part in parts.items() if asked in (None, name)}
    for name, rows in results.items():
        shown = list(rows_of(rows)) if name == "plans" else rows
        heads = dict.fromkeys(key for row in shown for key in row)
        print("\n".join(table({head: str(row.get(head, "")) for head in heads} for row in shown)))
        print()
    if asked is None:
        parts_text = (
            f'"{name}": [\n' + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "]"
            for name, rows in results.items()
        )
        RESULTS.write_text("{" + ",\n".join(parts_text) + "}\n")


if __name__ == "__main__":
    main()
