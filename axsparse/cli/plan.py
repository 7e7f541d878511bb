"""`axsparse plan`: predicts in which layout a model should train, why, and how fast."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from axsparse.cli.parser import CommandParser, add_configuration, say, whole
from axsparse.config.load import load_config
from axsparse.config.validate import check_config, counted
from axsparse.planner.cluster import DEFAULT_CLUSTER, cluster_text, load_cluster
from axsparse.runtime.errors import ConfigError, writing
from axsparse.runtime.launcher import speaks

if TYPE_CHECKING:
    from axsparse.planner.cluster import Cluster
    from axsparse.planner.layout_search import Plan
    from axsparse.planner.plan_model import Method, Subject

DESCRIPTION = """\
Plan a training run: stages, replicas, memory, seconds. Needs no GPU and no MPI.

  axsparse plan --config gpt3_2.7b.yaml --gpus 512 --cluster summit
  axsparse plan --config gpt3_xl.yaml --gpus 64,128,256,512 --cluster summit --compare dense,samo
  axsparse plan --config my.yaml --gpus 8 --cluster my_cluster.yaml --html plan.html
"""
EPILOG = """\
A layout is stages × replicas, or stages × members × replicas where several ranks may compute a
stage together. The fewest ranks for a copy of the model that fit are recommended, at their fastest
microbatch size; the other layouts follow by predicted step. Phases are the mean over stages.

A configuration with layout.g_inter, g_tensor, g_data or split leaves only those layouts.
A cluster file says where each constant comes from; benchmarks/calibrate.py measures one.
"""
METHODS = ("dense", "samo")


def parser() -> CommandParser:
    """The command line."""
    arguments = CommandParser(_plan, prog="axsparse plan", description=DESCRIPTION, epilog=EPILOG)
    add = arguments.add_argument
    add_configuration(add)
    add(
        "--gpus",
        metavar="N[,N…]",
        type=_numbers,
        required=True,
        help="number of devices; several numbers make a scaling study",
    )
    add(
        "--cluster",
        metavar="NAME",
        help="a bundled cluster (summit, selene-a100, dgx-h100, …: docs/howto/plan.md) or a file "
        f"(default {DEFAULT_CLUSTER})",
    )
    add(
        "--print-cluster",
        metavar="NAME",
        action=PrintCluster,
        help="print the file of a bundled cluster, to begin one of your own with, and end",
    )
    add(
        "--microbatch-size",
        metavar="N[,N…]",
        type=_numbers,
        help="sizes to try; by default every power of two that divides the batch and leaves each "
        "replica a microbatch",
    )
    add(
        "--members",
        metavar="N[,N…]",
        type=_numbers,
        help="numbers of ranks to try that compute each stage together (layout.g_tensor); by "
        "default the powers of two that fit a node, where training can cut the model",
    )
    add("--compare", metavar="METHODS", type=_methods, help="dense,samo: plan both, side by side")
    add("--json", action="store_true", help="print everything as one JSON object")
    add("--trace", metavar="FILE", type=Path, help="write the simulated step as a Chrome trace")
    add(
        "--html",
        metavar="FILE",
        type=Path,
        help="write timeline, memory and curves as a page; needs axsparse[plot]",
    )
    return arguments


class PrintCluster(argparse.Action):
    """Prints a cluster file and ends the process, whatever else is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        _, name, _ = given
        text = cluster_text(name).rstrip("\n")
        if speaks():
            say(text)
        parser.exit()


def _plan(arguments: argparse.Namespace) -> None:
    gpus, methods = arguments.gpus, arguments.compare or ["start"]
    cluster = load_cluster(arguments.cluster or DEFAULT_CLUSTER)
    loaded = load_config(arguments.config, arguments.overrides)
    check_config(loaded)
    # Imported late, so that --help and mistakes in what the user wrote do not load torch.
    from axsparse.observe import trace_file as trace
    from axsparse.observe.charts import check_installed
    from axsparse.planner.plan_model import subject
    from axsparse.planner.plan_report import has_members, spans

    if arguments.html is not None:
        check_installed("--html")
    asked = subject(loaded, cluster)
    try:
        plans = partial(
            asked.plan,
            microbatch_sizes=arguments.microbatch_size,
            members=arguments.members,
        )
        answers = list(_answers(plans, cluster, gpus, methods))
    except ConfigError as error:
        if arguments.cluster is not None:
            raise
        assumed = f"{DEFAULT_CLUSTER} was taken, since no --cluster is named"
        raise ConfigError(f"{error}; {assumed}") from error
    notes = list(asked.notes)
    if arguments.cluster is None:
        notes.append(
            f"no --cluster, hence planned for the bundled cluster {DEFAULT_CLUSTER}; "
            "benchmarks/calibrate.py measures one of your own"
        )
    if cluster.host_memory_bytes is not None and any(map(has_members, answers)):
        notes.append(
            "no two GPUs have trained with several members of a stage so far: they are tested on "
            "one that they share, and over NCCL on devices that are played"
        )
    if len(gpus) == 1 and methods == ["start"]:
        notes += _training_differs(asked, answers[0])
    _print(answers, notes, as_json=arguments.json, is_study=len(gpus) > 1)
    if arguments.trace is not None:
        last = answers[-1]
        devices = counted(last.gpus, "device")
        source = f"simulated: {last.workload.name} ({last.method}), {devices}"
        trace.write(arguments.trace, spans(last.recommended), source)
    if arguments.html is not None:
        _write_page(arguments.html, answers, notes)


def _answers(
    plans: Callable[[Method, Cluster, int], Plan],
    cluster: Cluster,
    gpus: Sequence[int],
    methods: Sequence[Method],
) -> Iterator[Plan]:
    """The plan of every method for every number of devices.

    Where several are asked for, one that fits nothing is left out with a line on stderr;
    ConfigError if nothing fits at all.
    """
    pairs = [(number, method) for number in gpus for method in methods]
    failures = []
    for number, method in pairs:
        try:
            plan = plans(method, cluster, number)
        except ConfigError as error:
            failures.append(error)
            if len(failures) == len(pairs):
                raise
            print(f"axsparse: {method}: {error}", file=sys.stderr, flush=True)
            continue
        at_start = "samo" if plan.workload.is_pruned else "dense"
        yield replace(plan, method=at_start if method == "start" else method)


def _training_differs(asked: Subject, plan: Plan) -> Iterator[str]:
    """A note if training, left to itself, would take other numbers of stages or members."""
    from axsparse.planner.auto_layout import resolve_grid

    layout, best = asked.loaded.config.layout, plan.recommended.layout.grid
    if best.g_tensor != layout.g_tensor:
        yield (
            "training by itself takes as many members as layout.g_tensor says, "
            f"{layout.g_tensor}; the --set options above train what is recommended"
        )
        return
    given = (layout.memory_per_rank, layout.g_inter, layout.g_data, layout.split)
    if given != ("auto",) * len(given):
        return  # both keep to what is given, or take the fewest stages that fit the limit
    grid = resolve_grid(asked.loaded, best.size, len(asked.survey.layers))
    if grid.g_inter != best.g_inter:
        yield (
            f"training by itself takes {grid}: where layout.memory_per_rank sets no limit, "
            "layout.g_inter: auto takes 2 stages if 2 divides the ranks, whatever is faster; the "
            "--set options above train what is recommended"
        )


def _print(answers: Sequence[Plan], notes: Sequence[str], *, as_json: bool, is_study: bool) -> None:
    from axsparse.planner import plan_report as report

    if as_json:
        everything = {"plans": [report.as_json(answer) for answer in answers], "notes": notes}
        say(json.dumps(everything))
        return
    if not is_study:
        say("\n".join(report.lines(answers, notes)))
        return
    plan = answers[0]
    head = f"{plan.workload.name} in {plan.workload.precision} on {plan.cluster.name}"
    rest = (f"note: {note}" for note in notes)
    say("\n".join([head, "", *report.scaling(answers), *rest]))


def _write_page(path: Path, answers: Sequence[Plan], notes: Sequence[str]) -> None:
    from axsparse.planner.html_page import page

    with writing(f"--html {path}:", "choose another place"):
        path.write_text(page(answers, notes), encoding="utf-8")


def _numbers(text: str) -> list[int]:
    """The whole numbers of at least 1 in a text that separates them by commas."""
    return [*map(whole(), text.split(","))]


def _methods(text: str) -> list[Method]:
    methods = text.split(",")
    if not {*methods} <= {*METHODS}:
        raise argparse.ArgumentTypeError(f"{text!r} is not of {','.join(METHODS)}; choose of these")
    return cast("list[Method]", methods)
