"""Prunes a model of a Hugging Face folder, heals it, and writes a folder again, on all ranks.

Tokens are prepared, the model is pruned and healed one layer at a time, with held-out samples that
are evaluated before and after, and the folder is written from the layers' files; no rank ever has
the full model. Such a folder may then be trained, with its masks or while they rise. A page in
Markdown reports the result. A second start with the same arguments skips the steps that are done.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from axsparse.cli.data import prepare_and_show
from axsparse.cli.parser import override, say
from axsparse.cli.prune_defaults import Work, chosen, plan_lines, rising, training_settings
from axsparse.cli.prune_order import BLOCKWISE, FACTS, PRUNED, PruneOrder
from axsparse.config.hf_config import read_json
from axsparse.config.schema import Config, sample_length
from axsparse.config.validate import check_config
from axsparse.data.dataset import Datasets
from axsparse.data.preparation import Request
from axsparse.data.sources import open_datasets
from axsparse.data.token_file import read_sidecar
from axsparse.models.layer import StartValues
from axsparse.models.start_weights import FromFile, open_weights
from axsparse.models.zoo.model_registry import named_model
from axsparse.observe.metrics import perplexity
from axsparse.runtime.communication import Transport
from axsparse.runtime.console import format_bytes, format_seconds
from axsparse.runtime.errors import StoppedError, writing
from axsparse.runtime.exchange import gather_texts, text_of_first, together
from axsparse.runtime.files.atomic import new_path
from axsparse.runtime.job import Job
from axsparse.runtime.machine import peak_memory_bytes
from axsparse.samo.optim.optimizer import optimizer_of
from axsparse.training.build import PrunedLayers, prune_layers
from axsparse.training.checkpoint.verification import steps_in
from axsparse.training.export import CARD, Weights, export, export_folder, with_card
from axsparse.training.plan import RunPlan
from axsparse.training.trainer import build

UNTRAINED = (
    *("optimizer.name=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"),
    *("schedule.warmup_steps=0", "train.steps=1", "train.teacher=null"),
)
"""Settings of a model that is evaluated or saved, and makes no step: state without moments."""


Seconds = dict[str, float]
"""The seconds of each part of the work, in order."""


@contextlib.contextmanager
def timed(seconds: Seconds, part: str) -> Iterator[None]:
    """Time a part of the work."""
    began = time.monotonic()
    yield
    seconds[part] = time.monotonic() - began


def prune_folder(job: Job, order: PruneOrder) -> None:
    """Do all that `axsparse prune` without `--dry-run` promises; all ranks call this together."""
    transport, seconds = job.transport, Seconds()
    is_first = transport.rank == 0
    order = together(transport, partial(chosen, order))
    lock = together(transport, lambda: order.take() if is_first else None)
    job.kept = f"what is finished is in {order.work}, and the same command continues"
    with timed(seconds, "tokens"):
        together(transport, lambda: _prepare(order) if is_first else None)
    order, asked = together(transport, partial(_with_settings, order))
    together(transport, lambda: order.adopt(asked) if is_first else None)
    try:
        facts = (_trained if order.heal == "train" else _pruned)(job, order, asked, seconds)
    except StoppedError as stopped:
        saved = str(stopped).partition("; ")[0]
        raise StoppedError(f"{saved}; the same command continues") from None
    peaks = gather_texts(transport.world, transport.backoff, str(peak_memory_bytes()))

    def write() -> None:
        if not is_first:
            return
        numbers = sum(map(math.prod, open_weights(order.out).shapes.values()))
        complete = replace(facts, peak_bytes=max(map(int, peaks)), half_bytes=2 * numbers)
        text = page(order, asked, complete, seconds)
        write_page(order.out, with_card(text, order.source))
        say(text)
        say(f"axsparse: wrote {order.out}")

    together(transport, write)
    if lock is not None:
        lock.release()


def _with_settings(order: PruneOrder) -> tuple[PruneOrder, Config]:
    """The order with the settings that follow from its tokens, and its configuration."""
    config = order.configured()
    tokens = read_sidecar(order.work / "tokens", "--out").train.tokens
    trains = order.heal == "train"
    training = [*training_settings(config, order.length(config), tokens)] if trains else []
    order = replace(order, settings=(*training, *order.settings))
    config = order.configured()
    implied = order.implied(config, config.batch.global_batch_size)
    order = replace(order, settings=(*implied, *order.settings))
    return order, order.configured()


def _pruned(job: Job, order: PruneOrder, asked: Config, seconds: Seconds) -> Facts:
    """Prune and heal one layer at a time, and write the folder, or the one that is trained."""
    transport = job.transport
    is_first = transport.rank == 0
    settings = (*order.of_layers(asked), *UNTRAINED)
    config = together(transport, partial(order.configured, *settings))
    together(transport, partial(check_config, config))
    length = order.length(asked)
    judged = together(transport, partial(order.configured, f"data.sequence_length={length}"))

    def opened() -> Datasets:
        """Samples of calibration, and held-out ones as the training has them."""
        return replace(open_datasets(config), validation=open_datasets(judged).validation)

    with timed(seconds, "pruning and healing"):
        model = together(transport, lambda: named_model(config))
        announce = partial(_announce, order, asked, transport)
        done = prune_layers(job, model, opened, config, order.work / "layers", announce)
    start, targets = model.start, done.plan.targets
    assert start is not None and targets is not None, "the model is of a folder, and pruned"
    kept: dict[str, int] = {}

    def read(layer: str, name: str) -> Tensor | None:
        value = start.read(name)
        if value is not None and layer in done.pruned:
            value = done.healed.value(layer, name, value)
        if value is not None and name in targets.shapes:
            kept[name] = int(value.count_nonzero())
        return value

    def write() -> int:
        if not is_first:
            return 0
        named = _dtype_of(start)
        folder, dtype = order.out, named
        if order.heal == "train":
            folder, dtype = order.work / PRUNED, lambda _: torch.float32
        return export_folder(done.plan.config, done.plan.profile, read, folder, dtype, named)

    with timed(seconds, "export"):
        nbytes = together(transport, write)
    kept = json.loads(text_of_first(transport, json.dumps(kept)))
    blocks = {
        layer.name: errors
        for layer in done.plan.profile.layers
        if (errors := done.healed.errors(layer.name)) is not None
    }
    return Facts(
        done.before,
        done.after,
        sum(map(math.prod, targets.shapes.values())),
        sum(kept.values()),
        nbytes,
        _state_of(order, done, kept),
        held_out=done.held_out,
        blocks=blocks,
    )


def _announce(
    order: PruneOrder,
    asked: Config,
    transport: Transport,
    plan: RunPlan,
    block_seconds: float | None,
) -> None:
    """Say on rank 0 what is done and how long it takes, by the time of a microbatch in a layer."""
    if transport.rank:
        return
    assert plan.targets is not None, "something is pruned"
    names, work = plan.targets.shapes, None
    pruned = [
        layer.flops
        for layer in plan.profile.layers
        if any(parameter.name in names for parameter in layer.parameters)
    ]
    if block_seconds is not None:
        work = Work(
            pruned[0],
            len(pruned),
            plan.profile.flops,
            sample_length(plan.config),
            block_seconds / plan.config.batch.microbatch_size,
            transport.size,
        )
    for line in plan_lines(order, asked, work):
        say(f"axsparse: {line}")


def _dtype_of(start: StartValues | None) -> Callable[[str], torch.dtype]:
    """The type that each parameter has in the folder that is pruned, in which it is written."""
    assert isinstance(start, FromFile), "the model is of a folder"
    return start.dtype


def _state_of(order: PruneOrder, done: PrunedLayers, kept: Mapping[str, int]) -> int:
    """The bytes of one rank's state if the pruned model is trained on as the settings say."""
    config = order.configured()
    run = replace(
        done.plan,
        config=done.plan.config.model_copy(update={"optimizer": config.optimizer}),
        optimizer=optimizer_of(config.optimizer),
    )
    return run.state_bytes(run.profile.layers, kept)


def _trained(job: Job, order: PruneOrder, asked: Config, seconds: Seconds) -> Facts:
    """Prune and heal one layer at a time, train, and write the folder."""
    transport = job.transport
    is_first, path, run = transport.rank == 0, order.work / FACTS, order.work / "run"
    # Steps of a training stand for the folder that it has begun with.
    if not together(transport, lambda: steps_in(run)):
        found = _pruned(job, order, asked, seconds)

        def keep() -> None:
            if is_first:
                with writing(f"--out: {path}", "free the disk"), new_path(path) as unfinished:
                    unfinished.write_text(json.dumps(asdict(found)), encoding="utf-8")

        together(transport, keep)
    before = Facts(**together(transport, lambda: read_json(path)))
    settings = [
        override("model.from", order.work / PRUNED),
        *("pruning.heal=none", f"data.sequence_length={order.length(asked)}"),
        *_masks_of(order, asked, before),
    ]
    config = together(transport, partial(order.configured, *settings))
    together(transport, partial(check_config, config))
    model = together(transport, lambda: named_model(config))
    trainer = build(job, model, partial(open_datasets, config), config, resume="auto")
    with timed(seconds, "training"):
        trainer.train()
    with timed(seconds, "evaluation"):
        evaluation = trainer.evaluate()
    targets, state = trainer.plan.targets, trainer.state_bytes().total
    assert targets is not None, "something is pruned"
    assert evaluation is not None, "`PruneOrder.adopt` rejects train.eval_steps 0"
    trainer.close()

    def write() -> tuple[int, int]:
        if not is_first:
            return 0, 0
        dtype = _dtype_of(named_model(order.configured()).start)
        done = export(run, "hf", order.out, force=True, dtype=dtype, card=False)
        weights = Weights(done.checkpoint, trained=False)
        kept = sum(int(weights.dense(name).count_nonzero()) for name in targets.shapes)
        return done.nbytes, kept

    with timed(seconds, "export"):
        nbytes, kept = together(transport, write)
    return replace(
        before,
        after=evaluation.loss,
        pruned=before.after,
        entries=sum(map(math.prod, targets.shapes.values())),
        kept=kept,
        export_bytes=nbytes,
        state_bytes=state,
    )


def _masks_of(order: PruneOrder, asked: Config, facts: Facts) -> list[str]:
    """The settings by which a training keeps the zeros of a folder, or makes more and more."""
    zeros = f"{1 - facts.kept / facts.entries:.4f}"
    if order.schedule == "once":
        return ["pruning.method=zeros", f"pruning.sparsity={zeros}", "pruning.layers=[]"]
    initial = BLOCKWISE if asked.pruning.layers else zeros
    return [*rising(asked), f"pruning.initial_sparsity={initial}"]


def _prepare(order: PruneOrder) -> None:
    """Prepare the tokens, unless that has been done."""
    request = Request(
        inputs=order.data,
        out=order.work / "tokens",
        validation=order.validation,
        validation_fraction=0.0 if order.validation else 0.05,
        tokenizer=order.source,
        separator=order.separator,
    )
    prepare_and_show(request, len(os.sched_getaffinity(0)))


def write_page(folder: Path, text: str) -> None:
    """Write the page next to the weights; OutputError if that fails."""
    with (
        writing(f"--out: the page in {folder}", "choose another place"),
        new_path(folder / CARD) as unfinished,
    ):
        unfinished.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Facts:
    """The results of the pruning."""

    before: float
    """The validation loss of the dense model."""
    after: float
    """The validation loss of the pruned model."""
    entries: int
    """The entries of the pruned matrices."""
    kept: int
    """The kept entries of the pruned matrices."""
    export_bytes: int
    """The bytes of the weights that were written."""
    state_bytes: int
    """The bytes of the model state of one rank."""
    half_bytes: int = 0
    """The bytes of these weights in a type of 16 bits."""
    peak_bytes: int = 0
    """The most memory that a rank has had."""
    held_out: int = 0
    """The validation samples that the losses are of."""
    pruned: float | None = None
    """The validation loss of the pruned model before it was trained; None where it was not."""
    blocks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The error of a token before and after healing, of each layer that was fitted; of the last
    one the loss of a target."""


def page(order: PruneOrder, config: Config, facts: Facts, seconds: Seconds) -> str:
    """The page about a pruned model, in Markdown."""
    pruning = config.pruning
    removed = 1 - facts.kept / facts.entries
    trained, rises = order.heal == "train", order.schedule == "gradual"
    report = shlex.join(["axsparse", "report", str(order.work / "run")])
    healed = "trained on" if trained else f"healed: {order.heal}"
    by = f"{pruning.method}, then by magnitude in training" if rises else pruning.method
    figures: list[tuple[str, Callable[[float], str]]] = [
        ("validation loss", "{:.4f}".format),
        ("perplexity", lambda loss: f"{perplexity(loss):.3f}"),
    ]
    losses = [facts.before, *([] if facts.pruned is None else [facts.pruned]), facts.after]
    first = "before training" if trained else "pruned"
    columns = ["dense", *([] if facts.pruned is None else [first]), "this folder"]
    lines = [
        f"# {order.out.name}",
        "",
        f"{order.source.name}, of whose pruned matrices {100 * removed:.1f} % of the entries are "
        f"zero (by {by}), {healed}.",
        "",
        f"| {facts.held_out} validation samples | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
        *(f"| {name} | {' | '.join(map(show, losses))} |" for name, show in figures),
        "",
        "| weights in | bytes |",
        "|---|---|",
        *(
            f"| {name} | {format_bytes(nbytes)} |"
            for name, nbytes in _sizes(facts, pruning.pattern)
        ),
        "",
        "The folder loads in transformers and everything that reads its folders. Zeros alone make "
        "nothing there faster or smaller: their kernels multiply dense matrices. What gains is "
        f"training on with axsparse, whose state is {format_bytes(facts.state_bytes)} a rank here"
        + (
            "; and 2:4 patterns (`pruning.pattern`) on NVIDIA GPUs with sparse tensor cores."
            if pruning.pattern is None
            else f"; and its pattern, {pruning.pattern}, on NVIDIA GPUs with sparse tensor cores."
        ),
        "",
        "```",
        shlex.join(_training_on(order, removed)),
        "```",
        "",
        *([f"`{report}` draws the training.", ""] if trained else []),
        "| part | time |",
        "|---|---|",
        *(f"| {name} | {format_seconds(value)} |" for name, value in seconds.items()),
        "",
        f"A rank had at most {format_bytes(facts.peak_bytes)} of memory. Both figures are of the "
        "start that wrote this, and not of earlier ones that were cut.",
        "",
        f"To judge it by others: `lm_eval --model hf --model_args pretrained={order.out.name} "
        "--tasks TASKS` (`pip install 'axsparse[eval]'`).",
        "",
    ]
    return "\n".join([*lines, *_errors(facts.blocks)])


def _sizes(facts: Facts, pattern: str | None) -> list[tuple[str, int]]:
    """The bytes of the weights in several formats."""
    half, pruned = facts.half_bytes, facts.entries - facts.kept
    sizes = [
        ("safetensors: this folder", facts.export_bytes),
        ("safetensors, bf16 or fp16: `save_pretrained` after `from_pretrained(dtype=…)`", half),
        ("kept entries in bf16 and one bit an entry", half - 2 * pruned + facts.entries // 8),
    ]
    if pattern == "2:4":
        packed = half - facts.entries + facts.entries // 4
        sizes.append(("2:4 as sparse tensor cores read it: half the entries, 2 bits each", packed))
    return sizes


def _training_on(order: PruneOrder, removed: float) -> list[str]:
    """The command that trains the folder on, with the zeros that it has."""
    settings = (
        override("model.from", order.out),
        "data.source=tokens",
        override("data.path", order.work / "tokens"),
        "pruning.method=zeros",
        f"pruning.sparsity={removed:.4f}",
    )
    return [
        *("axsparse", "train", "--config", order.config, "--run-dir", f"{order.out}.trained"),
        *(word for each in settings for word in ("--set", each)),
    ]


def _errors(blocks: Mapping[str, tuple[float, float]]) -> list[str]:
    """The table of errors of layers that were fitted, if any was."""
    if not blocks:
        return []
    *_, last = blocks
    return [
        "| layer | error of a token before healing | after |",
        "|---|---|---|",
        *(
            f"| {name}{', loss of a target' * (name == last)} | {before:.4f} | {after:.4f} |"
            for name, (before, after) in blocks.items()
        ),
        "",
    ]
