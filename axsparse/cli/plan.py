"""`axsparse plan`: predicts in which layout a model should train, why, and how fast."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import shlex
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from axsparse.cli.parser import (
    CommandParser,
    add_configuration,
    decimal,
    integer,
    override,
    overrides_of,
    say,
    share,
)
from axsparse.config.hf_config import BUNDLED, CONFIG_FILE, is_gpt2, read_json, reject_other_heads
from axsparse.config.load import bundled_source, configure
from axsparse.config.schema import Config, sample_length
from axsparse.config.section import counted
from axsparse.config.validate import check_config
from axsparse.planner.cluster import DEFAULT_CLUSTER, cluster_text, load_cluster
from axsparse.runtime.errors import EXIT_CONFIG, ConfigError, MissingInputError
from axsparse.runtime.files.paths import expanded, kind_of
from axsparse.runtime.process import exit_process, speaks

if TYPE_CHECKING:
    from axsparse.planner.cluster import Cluster
    from axsparse.planner.layout_search import Plan
    from axsparse.planner.plan_model import Method, PlannedModel
    from axsparse.planner.what_fits import DoesNotFitError

DESCRIPTION = """\
Does it fit? Plan a training run: stages, replicas, memory, seconds. Needs no GPU and no MPI.

  axsparse plan FOLDER --gpus 4 --memory 40
  axsparse plan --config gpt3_2.7b.yaml --gpus 512 --cluster summit
  axsparse plan --config gpt3_xl.yaml --gpus 64,128,256,512 --cluster summit --compare dense,samo
  axsparse plan --config my.yaml --gpus 8 --cluster my_cluster.yaml
"""
EPILOG = """\
The first line is the answer, and the exit code is 78 where nothing fits. FOLDER is a Hugging Face
folder, of which config.json alone is read; it is planned by the settings of prune_llama.yaml, in
samples of at most 4,096 tokens.

A layout is stages × replicas, or stages × tensor-parallel ranks × replicas where several ranks
compute a stage together (layout.g_tensor). The fewest stages that fit are recommended, at their
fastest microbatch size; the other layouts follow by predicted step. Phases are the mean over
stages.

A configuration with layout.g_inter, g_tensor, g_data or split leaves only those layouts.
A cluster file says where each constant comes from; benchmarks/calibrate.py measures one.
"""
METHODS = ("dense", "samo")
GPU_CLUSTER = "a100-pod"
"""The bundled cluster that is taken where the memory of a device is given and no cluster is."""
LONGEST = 4096
"""Tokens of a sample of a model from a folder at most, unless they are given: as in
llama3_8b.yaml."""


def parser() -> CommandParser:
    arguments = CommandParser(_plan, prog="axsparse plan", description=DESCRIPTION, epilog=EPILOG)
    add = arguments.add_argument
    _add_request(add)
    text = (
        "a bundled cluster (summit, selene-a100, dgx-h100, …: docs/howto/plan.md) or a file "
        f"(default layout.cluster, else {DEFAULT_CLUSTER}, with --memory {GPU_CLUSTER})"
    )
    add("--cluster", metavar="NAME", help=text)
    text = "print the file of a bundled cluster, to begin one of your own with, and end"
    add("--print-cluster", metavar="NAME", action=PrintCluster, help=text)
    text = (
        "sizes to try; by default every power of two that divides the batch and leaves each "
        "replica a microbatch"
    )
    add("--microbatch-size", metavar="N[,N…]", type=_numbers, help=text)
    add("--compare", metavar="METHODS", type=_methods, help="dense,samo: plan both, side by side")
    add("--json", action="store_true", help="print everything as one JSON object")
    return arguments


def _add_request(add: Callable[..., object]) -> None:
    text = (
        "a folder with the config.json of a causal language model of transformers, or a "
        "configuration as for --config"
    )
    add("model", metavar="FOLDER_OR_CONFIG", nargs="?", help=text)
    add_configuration(add)
    text = "number of devices; several numbers make a scaling study"
    add("--gpus", metavar="N[,N…]", type=_numbers, required=True, help=text)
    gigabytes = decimal("number of gigabytes above 0, such as 40", lambda value: value > 0)
    text = "memory of a device, everything included; short for --set layout.memory_per_rank=GB"
    add("--memory", metavar="GB", type=gigabytes, help=text)
    text = "short for --set pruning.sparsity=S; 0 is dense"
    add("--sparsity", metavar="S", type=share, help=text)
    text = "tokens of a sample; short for --set data.sequence_length=N"
    add("--sequence-length", metavar="N", type=integer(), help=text)


class PrintCluster(argparse.Action):
    """Prints a cluster file and ends the process, whatever else is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> None:
        _, name, _ = given
        text = cluster_text(name).rstrip("\n")
        if speaks():
            say(text)
        parser.exit()


def _plan(arguments: argparse.Namespace) -> None:
    _spare_collections()
    config, notes = _read(arguments)
    check_config(config)
    arguments.cluster = arguments.cluster or config.layout.cluster
    # Who says how much memory a device has means a GPU.
    usual = DEFAULT_CLUSTER if arguments.memory is None else GPU_CLUSTER
    cluster = load_cluster(arguments.cluster or usual)
    # Imported late, so that --help and mistakes of the user do not load torch.
    from axsparse.planner.plan_model import BATCH, planned_model
    from axsparse.planner.what_fits import DoesNotFitError

    asked = planned_model(config, cluster)
    sizes, batch = arguments.microbatch_size, asked.batch(min(arguments.gpus))
    if sizes and min(sizes) > batch:
        raise ConfigError(
            f"--microbatch-size: {min(sizes)} is above the batch of {batch} samples ("
            f"{BATCH}); choose at most {batch}"
        )
    answers, refusals = [], []
    for gpus, method in product(arguments.gpus, arguments.compare or ["start"]):
        try:
            answers.append(asked.plan(method, cluster, gpus, arguments.microbatch_size))
        except DoesNotFitError as error:  # noqa: PERF203 - a plan takes seconds
            refusals.append(error)
    notes = [*asked.notes, *notes, *_notes(arguments, asked, cluster)]
    _print(answers, refusals, notes, arguments)
    if not answers:
        exit_process(EXIT_CONFIG)


def _read(arguments: argparse.Namespace) -> tuple[Config, list[str]]:
    overrides, source = overrides_of(arguments), arguments.model
    if source is None:
        return configure(arguments.config, overrides), []
    if arguments.config is not None:
        raise ConfigError(
            f"--config: {arguments.config!r}, but {source!r} is planned; leave one of them out"
        )
    path = Path(expanded(source))
    there = kind_of(f"{source!r}:", path)
    if path.name == CONFIG_FILE and there == "file":
        return _read_folder(path.parent, overrides)
    if there == "folder":
        return _read_folder(path, overrides)
    try:
        return configure(source, overrides), []
    except MissingInputError as error:
        raise MissingInputError(
            f"{error}; or name a folder with the {CONFIG_FILE} of a model"
        ) from error


def _read_folder(folder: Path, overrides: Sequence[str]) -> tuple[Config, list[str]]:
    """The model of a Hugging Face folder by the settings of `BUNDLED`, which count as defaults."""
    path = folder / CONFIG_FILE
    if kind_of(f"{str(folder)!r}:", path) != "file":
        raise MissingInputError(
            f"{str(folder)!r} has no {CONFIG_FILE}; name a folder that has one, or a configuration"
        )
    theirs = read_json(path)
    reject_other_heads(path, theirs)
    model = [override("model.from", folder)]
    if is_gpt2(path, theirs):
        model.append("model.name=gpt")  # which needs no transformers
    bundled = bundled_source()
    config = configure(bundled, [*model, *overrides])
    length = sample_length(config)
    if config.data.sequence_length == "auto" and length > LONGEST:
        model.append(f"data.sequence_length={LONGEST}")
        config = configure(bundled, [*model, *overrides])
        length = LONGEST
    given = {k: at for k, at in config.origins.items() if not at.startswith(f"{BUNDLED}:")}
    asked = " ".join(f"--set {shlex.quote(each)}" for each in model)
    note = (
        f"a folder is planned by {BUNDLED}, in samples of {length} tokens; to train it, add "
        f"--config {shlex.quote(bundled)} {asked}"
    )
    return config.with_origins(folder.resolve().name, given), [note]


def _notes(arguments: argparse.Namespace, asked: PlannedModel, cluster: Cluster) -> Iterator[str]:
    from axsparse.planner.plan_model import BATCH

    if BATCH not in asked.config.origins:
        batches = ", ".join(str(asked.batch(gpus)) for gpus in arguments.gpus)
        yield f"no batch is given: planned with {batches} samples a step ({BATCH})"
    if arguments.cluster is None:
        yield (
            f"no --cluster, hence planned for the bundled cluster {cluster.name}, with "
            f"{cluster.overhead_bytes / 1e9:g} GB of overhead; benchmarks/calibrate.py measures "
            "one of your own"
        )
    if cluster.host_memory_bytes is not None and asked.config.layout.g_tensor > 1:
        yield (
            "no two GPUs have trained with several tensor-parallel ranks of a stage so far: they "
            "are tested on one that they share, and over NCCL on devices that are played"
        )


def _spare_collections() -> None:
    """Look for garbage seldom, and not at the exit: while libraries load, looks take a seventh of
    the time and find nothing; at the exit a second."""
    gc.set_threshold(100_000)
    atexit.register(gc.freeze)


def _print(
    answers: Sequence[Plan],
    refusals: Sequence[DoesNotFitError],
    notes: Sequence[str],
    arguments: argparse.Namespace,
) -> None:
    from axsparse.planner import plan_report as report

    if arguments.json:
        everything = {
            "plans": [report.as_json(answer) for answer in answers],
            "refusals": [report.refusal_json(refusal) for refusal in refusals],
            "notes": notes,
        }
        say(json.dumps(everything))
        return
    if not answers and len(refusals) == 1:
        say("\n".join(report.refusal_lines(refusals[0], notes)))
        return
    lines = [
        f"{counted(each.request.gpus, 'device')}, {each.request.method}: {each}"
        for each in refusals
    ]
    if len(arguments.gpus) == 1 and answers:
        say("\n".join(report.lines(answers, [*lines, *notes])))
        return
    if answers:
        request, model = answers[0].request, answers[0].request.model
        lines.append(f"{model.config.name} in {model.precision} on {request.cluster.name}")
        lines += ["", *report.scaling(answers)]
    say("\n".join([*lines, *(f"note: {note}" for note in notes)]))


def _numbers(text: str) -> list[int]:
    """The whole numbers of at least 1 in a text that separates them by commas."""
    return [*map(integer(), text.split(","))]


def _methods(text: str) -> list[Method]:
    methods = text.split(",")
    if not {*methods} <= {*METHODS}:
        raise argparse.ArgumentTypeError(f"{text!r} is not of {','.join(METHODS)}; choose of these")
    return cast("list[Method]", methods)
