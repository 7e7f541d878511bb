"""Prunes a model of a Hugging Face folder, heals it, and writes a folder again, on all ranks.

Tokens are prepared, the model is pruned and healed one layer at a time, with validation samples by
the side that are judged before and after, and the folder is written from the layers' files; nobody
ever has the whole model. Adapters are then trained on such a folder and merged. Where the pruned
model itself is trained, or masks need the whole model at once, the steps are those of the commands:
the dense model is evaluated, the pruned one is built, saved, trained, evaluated and exported. A
page says what came of it. Each step that is done is found done by a second start with the same
arguments.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from torch import Tensor

from axsparse.config.load import LoadedConfig, load_config
from axsparse.config.schema import Config, sample_length
from axsparse.config.validate import check_config
from axsparse.data.preparation import Request, prepare
from axsparse.data.sources import open_datasets
from axsparse.data.tokenizers import SEPARATOR, in_folder
from axsparse.models.adapters import INNER, OUTER, merged, with_adapters
from axsparse.models.layer import Model, StartValues
from axsparse.models.zoo.model_registry import named_model
from axsparse.observe.metrics import perplexity
from axsparse.runtime.console import format_bytes, format_seconds, make_console
from axsparse.runtime.errors import ConfigError, writing
from axsparse.runtime.exchange import gather_texts, together
from axsparse.runtime.job import Job
from axsparse.runtime.process_memory import peak_memory_bytes
from axsparse.samo.optim.optimizer import optimizer_of
from axsparse.training.build import HEALED, PrunedLayers, build, prune_layers
from axsparse.training.checkpoint.verification import checkpoint_of
from axsparse.training.export import Weights, export, export_folder
from axsparse.training.trainer import Trainer

PAGE = "README.md"
UNTRAINED = (
    *("optimizer.name=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"),
    *("schedule.warmup_steps=0", "train.steps=1"),
)
"""Settings of a model that is evaluated or saved, and makes no step: state without moments."""


Heal = Literal["none", "blocks", "adapters", "train"]
"""What follows the pruning; `train` trains the pruned model on for `train.steps`, and `adapters`
its adapters."""
SHORT = 256
"""Tokens of a sample for calibration and healing: more and shorter ones heal better than fewer and
longer ones of as many tokens (decision 49)."""
TRAINED = 1024
"""Tokens of a sample where all entries or adapters are trained, as the study has them."""
ONE_BY_ONE = ("magnitude", "random", "wanda", "sparsegpt")
"""Methods that prune a layer without looking at those behind it."""


@dataclass(frozen=True)
class PruneOrder:
    """What is asked for."""

    source: Path
    """The Hugging Face folder of the dense model."""
    data: tuple[Path, ...]
    """Files and folders of text, for calibration, healing and training."""
    validation: tuple[Path, ...]
    """Files and folders of text to evaluate on; without any, a twentieth of `data`."""
    out: Path
    """The folder that is written; beside it, `OUT.run` has the tokens and the run."""
    config: str
    settings: tuple[str, ...]
    """Overrides KEY=VALUE, of which later ones win."""
    heal: Heal
    rank: int = 16
    """The rank of adapters."""

    @property
    def work(self) -> Path:
        """The folder of the tokens and of the run."""
        return self.out.with_name(f"{self.out.name}.run")

    def overrides(self, *more: str) -> list[str]:
        """The settings of one of the runs."""
        return [
            f"model.from={self.source}",
            "data.source=tokens",
            f"data.path={self.work / 'tokens'}",
            f"run_dir={self.work / 'run'}",
            "pruning.at_step=0",
            *self.settings,
            *more,
        ]


@dataclass
class Timings:
    """Seconds of each part of the work, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Time a part."""
        began = time.monotonic()
        yield
        self.seconds[part] = time.monotonic() - began


def prune_folder(job: Job, order: PruneOrder) -> None:
    """Do all that `axsparse prune` without `--dry-run` promises; all ranks call this together."""
    transport, timings = job.transport, Timings()
    is_first = transport.rank == 0
    together(transport, lambda: _refuse_out(order) if is_first else None)
    with timings.of("tokens"):
        together(transport, lambda: _prepare(order) if is_first else None)
    asked = together(transport, lambda: load_config(order.config, order.overrides()))
    implied = (_judging(asked.config), *_sampling(order.heal, asked.config))
    order = replace(order, settings=(*implied, *order.settings))
    if order.heal == "train" or not _goes_by_layers(asked.config):
        facts = _prune_whole(job, order, timings)
    else:
        facts = _prune_by_layers(job, order, timings)
    peaks = gather_texts(transport.world, transport.backoff, str(peak_memory_bytes()))

    def write() -> None:
        if not is_first:
            return
        text = page(order, asked, replace(facts, peak_bytes=max(map(int, peaks))), timings.seconds)
        write_page(order.out, text)
        print(text, flush=True)
        print(f"axsparse: wrote {order.out}", flush=True)

    together(transport, write)


def _judging(config: Config) -> str:
    """The setting of how many validation samples are judged: about as many as calibrate."""
    batches = -(-config.pruning.calibration_samples // config.batch.global_batch_size)
    return f"train.eval_steps={batches}"


def _sampling(heal: Heal, config: Config) -> Sequence[str]:
    """The setting of how long samples are, unless it is given: a model's longest sequence takes
    more memory and time than its samples are worth."""
    if config.data.sequence_length != "auto":
        return []
    most = TRAINED if heal in ("train", "adapters") else SHORT
    return [f"data.sequence_length={min(sample_length(config), most)}"]


def _goes_by_layers(config: Config) -> bool:
    """Whether each layer is pruned by itself; otherwise masks need all of them, or change later, or
    members share every layer."""
    pruning = config.pruning
    return (
        pruning.method in ONE_BY_ONE
        and pruning.distribution != "global"
        and pruning.ticket is None
        and pruning.at_step == 0
        and config.layout.g_tensor == 1
    )


# -- layer by layer -----------------------------------------------------------------------


def _prune_by_layers(job: Job, order: PruneOrder, timings: Timings) -> Facts:
    """Prune and heal one layer at a time, perhaps train adapters, and write the folder."""
    transport = job.transport
    is_first = transport.rank == 0
    loaded = together(transport, lambda: load_config(order.config, order.overrides(*UNTRAINED)))
    together(transport, partial(check_config, loaded))
    with timings.of("pruning and healing"):
        model = together(transport, lambda: named_model(loaded))
        opened = partial(open_datasets, loaded)
        done = prune_layers(job, model, opened, loaded, order.work / "layers")
    start = model.start
    assert start is not None, "the model is of a folder"
    read = partial(_pruned_value, done, start)
    adapts = order.heal == "adapters"
    folder = order.work / "pruned" if adapts else order.out

    def write() -> int:
        return export_folder(done.run.config, done.run.survey, read, folder) if is_first else 0

    with timings.of("export"):
        nbytes = together(transport, write)
    after, state = done.after, _state_of(order, done)
    if adapts:
        after, state, nbytes = _adapt(job, order, done, timings)
    assert done.run.targets is not None, "something is pruned"
    kept, shapes = done.run.targets.kept(), done.run.targets.shapes
    blocks = {
        layer.name: errors
        for layer in done.run.survey.layers
        if (errors := done.healed.errors(layer.name)) is not None
    }
    return Facts(
        done.before,
        after,
        sum(math.prod(shape) for shape in shapes.values()),
        sum(kept.values()),
        nbytes,
        state,
        judged=done.judged,
        pruned=done.after if adapts else None,
        blocks=blocks,
    )


def _pruned_value(done: PrunedLayers, start: StartValues, layer: str, name: str) -> Tensor | None:
    """The value of a parameter or buffer of the pruned model."""
    value = start.read(name)
    return None if value is None else done.healed.value(layer, name, value)


def _state_of(order: PruneOrder, done: PrunedLayers) -> int:
    """The bytes of one rank's state if the pruned model is trained on as the settings say."""
    config = load_config(order.config, order.overrides()).config
    run = replace(
        done.run,
        config=done.run.config.model_copy(update={"optimizer": config.optimizer}),
        optimizer=optimizer_of(config.optimizer),
    )
    return run.state_bytes(run.survey.layers, run.kept_at_start)


def _adapt(
    job: Job, order: PruneOrder, done: PrunedLayers, timings: Timings
) -> tuple[float, int, int]:
    """Train adapters of the pruned folder and write the merged one; returns the loss after, the
    bytes of a rank's state, and those of the weights."""
    transport = job.transport
    pruned = order.work / "pruned"
    more = ("samo.enabled=false", f"model.from={pruned}")
    loaded = together(transport, lambda: load_config(order.config, order.overrides(*more)))
    together(transport, partial(check_config, loaded))
    assert done.run.targets is not None, "something is pruned"
    adapted = partial(with_adapters, matrices=done.run.targets.shapes, rank=order.rank)
    with timings.of("training"):
        trainer = _built(job, loaded, adapted, resume="auto")
        trainer.train()
    with timings.of("evaluation"):
        after = _loss_of(trainer)
    state = trainer.state_bytes().total
    trainer.close()

    def write() -> int:
        if transport.rank:
            return 0
        start = named_model(loaded).start
        assert start is not None, "the model is of a folder"
        weights = Weights(checkpoint_of(order.work / "run", None), trained=False)
        read = partial(_merged_value, weights, start)
        return export_folder(loaded.config, done.run.survey, read, order.out)

    with timings.of("merging"):
        nbytes = together(transport, write)
    return after, state, nbytes


def _merged_value(weights: Weights, start: StartValues, _: str, name: str) -> Tensor | None:
    """The value of a parameter or buffer of the model with merged adapters."""
    stem = name.rpartition(".")[0]
    inner, outer = f"{stem}.{INNER}", f"{stem}.{OUTER}"
    value = start.read(name)
    if value is not None and name.endswith(".weight") and inner in weights.parameters:
        return merged(value.float(), weights.dense(inner), weights.dense(outer))
    return weights.dense(name) if weights.is_trained(name) else value


# -- the whole model ----------------------------------------------------------------------


def _prune_whole(job: Job, order: PruneOrder, timings: Timings) -> Facts:
    """Evaluate the dense model, build the pruned one, perhaps train it, and export it."""
    transport = job.transport
    is_first = transport.rank == 0
    dense = together(
        transport,
        lambda: load_config(order.config, order.overrides("samo.enabled=false", *UNTRAINED)),
    )
    still = () if order.heal == "train" else UNTRAINED
    pruned = together(transport, lambda: load_config(order.config, order.overrides(*still)))
    for loaded in (dense, pruned):
        together(transport, partial(check_config, loaded))
    with timings.of("dense evaluation"):
        trainer = _built(job, dense, quiet=True)
        before = _loss_of(trainer)
        trainer.close()
    with timings.of("pruning and healing"):
        trainer = _built(job, pruned, resume="auto")
        if trainer.steps_done == 0:
            trainer.save()
        if is_first:
            shutil.rmtree(order.work / "run" / HEALED, ignore_errors=True)
    if order.heal == "train":
        with timings.of("training"):
            trainer.train()
    with timings.of("evaluation"):
        evaluation = trainer.evaluate()
        after = math.nan if evaluation is None else evaluation.loss
    targets, state = trainer.parts.run.targets, trainer.state_bytes().total
    trainer.close()

    def write() -> int:
        if not is_first:
            return 0
        return export(order.work / "run", "hf", order.out, force=True).nbytes

    with timings.of("export"):
        nbytes = together(transport, write)
    kept = {} if targets is None else targets.kept()
    shapes = {} if targets is None else targets.shapes
    return Facts(
        before,
        after,
        max(sum(math.prod(shape) for shape in shapes.values()), 1),
        sum(kept.values()),
        nbytes,
        state,
        judged=0 if evaluation is None else evaluation.samples,
    )


def _built(
    job: Job,
    loaded: LoadedConfig,
    changed: Callable[[Model], Model] = lambda model: model,
    *,
    quiet: bool = False,
    resume: str | None = None,
) -> Trainer:
    model = together(job.transport, lambda: changed(named_model(loaded)))
    return build(job, model, partial(open_datasets, loaded), loaded, quiet=quiet, resume=resume)


def _loss_of(trainer: Trainer) -> float:
    evaluation = trainer.evaluate()
    return math.nan if evaluation is None else evaluation.loss


def _refuse_out(order: PruneOrder) -> None:
    """ConfigError if the folder holds something that a run of this command has not written."""
    if order.out.exists() and (not order.out.is_dir() or any(order.out.iterdir())):
        raise ConfigError(
            f"--out: {order.out} is there already; remove it, or choose another place "
            f"(what was begun stays in {order.work})"
        )
    if order.out.resolve() == order.source.resolve():
        raise ConfigError(f"--out: {order.out} is the model itself; choose another place")


def _prepare(order: PruneOrder) -> None:
    """Prepare the tokens, unless that has been done."""
    tokenizer, end = in_folder(order.source)
    request = Request(
        inputs=order.data,
        out=order.work / "tokens",
        validation=order.validation,
        validation_fraction=0.0 if order.validation else 0.05,
        tokenizer=tokenizer,
        separator=end or SEPARATOR,
    )
    with contextlib.closing(make_console(sys.stdout)) as console:
        prepare(request, len(os.sched_getaffinity(0)), console)


# -- the page -----------------------------------------------------------------------------


def write_page(folder: Path, text: str) -> None:
    """Write the page beside the weights; OutputError if that fails."""
    with writing(f"--out: the page in {folder}", "choose another place"):
        (folder / PAGE).write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Facts:
    """What came of it."""

    before: float
    """The validation loss of the dense model."""
    after: float
    """That of the model which was written."""
    entries: int
    """The entries of the pruned matrices."""
    kept: int
    """Those of them that are kept."""
    export_bytes: int
    """The bytes of the weights that were written, which are fp32."""
    state_bytes: int
    """The bytes of the model state of one rank."""
    peak_bytes: int = 0
    """The most memory that a rank has had."""
    judged: int = 0
    """The validation samples that the losses are of."""
    pruned: float | None = None
    """The validation loss of the pruned model before adapters; None where there are none."""
    blocks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """The error of a token before and after healing, of each layer that was fitted; of the last
    one the loss of a target."""


def page(order: PruneOrder, loaded: LoadedConfig, facts: Facts, seconds: dict[str, float]) -> str:
    """The page about a pruned model, in Markdown."""
    pruning = loaded.config.pruning
    removed = 1 - facts.kept / facts.entries
    healed = "trained on" if order.heal == "train" else f"healed: {order.heal}"
    half = facts.export_bytes // 2
    pruned = facts.entries - facts.kept
    figures: list[tuple[str, Callable[[float], str]]] = [
        ("validation loss", "{:.4f}".format),
        ("perplexity", lambda loss: f"{perplexity(loss):.3f}"),
    ]
    losses = [facts.before, *([] if facts.pruned is None else [facts.pruned]), facts.after]
    columns = ["dense", *([] if facts.pruned is None else ["pruned"]), "this folder"]
    sizes = [
        ("safetensors, fp32: this folder", facts.export_bytes),
        ("safetensors, bf16 or fp16: `save_pretrained` after `from_pretrained(dtype=…)`", half),
        ("kept entries in bf16 and one bit an entry", half - 2 * pruned + facts.entries // 8),
    ]
    if pruning.pattern == "2:4":
        packed = half - facts.entries + facts.entries // 4
        sizes.append(("2:4 as sparse tensor cores read it: half the entries, 2 bits each", packed))
    lines = [
        f"# {order.out.name}",
        "",
        f"{order.source.name}, of whose pruned matrices {100 * removed:.1f} % of the entries are "
        f"zero (by {pruning.method}), {healed}.",
        "",
        f"| {facts.judged} validation samples | {' | '.join(columns)} |",
        f"|---|{'---|' * len(columns)}",
        *(f"| {name} | {' | '.join(map(show, losses))} |" for name, show in figures),
        "",
        "| weights in | bytes |",
        "|---|---|",
        *(f"| {name} | {format_bytes(nbytes)} |" for name, nbytes in sizes),
        "",
        "The folder loads in transformers and everything that reads its folders. Zeros alone make "
        "nothing there faster or smaller: their kernels multiply dense matrices. What gains is "
        "training on with axsparse (`axsparse train --set model.from=… --set "
        f"pruning.method=zeros`), whose state is {format_bytes(facts.state_bytes)} a rank here"
        + (
            "; and 2:4 patterns (`pruning.pattern`) on NVIDIA GPUs with sparse tensor cores."
            if pruning.pattern is None
            else f"; and its pattern, {pruning.pattern}, on NVIDIA GPUs with sparse tensor cores."
        ),
        "",
        "| part | time |",
        "|---|---|",
        *(f"| {name} | {format_seconds(value)} |" for name, value in seconds.items()),
        "",
        f"A rank had at most {format_bytes(facts.peak_bytes)} of memory.",
        "",
        f"To judge it by others: `lm_eval --model hf --model_args pretrained={order.out.name} "
        "--tasks TASKS` (`pip install 'axsparse[eval]'`).",
        "",
    ]
    return "\n".join([*lines, *_errors(facts.blocks)])


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
