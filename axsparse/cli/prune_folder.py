"""Prunes a model of a Hugging Face folder, heals it, and writes a folder again, on all ranks.

The steps are those of the commands by themselves: tokens are prepared, the dense model is
evaluated, the pruned one is built (which calibrates and heals), saved, perhaps trained on,
evaluated and exported, and a page says what came of it. Each step that is done is found done by a
second start with the same arguments.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from axsparse.config.load import LoadedConfig, load_config
from axsparse.config.validate import check_config
from axsparse.data.preparation import Request, prepare
from axsparse.data.sources import open_datasets
from axsparse.data.tokenizers import SEPARATOR, in_folder
from axsparse.models.zoo.model_registry import named_model
from axsparse.observe.metrics import perplexity
from axsparse.runtime.console import format_bytes, format_seconds, make_console
from axsparse.runtime.errors import ConfigError, writing
from axsparse.runtime.exchange import gather_texts, together
from axsparse.runtime.job import Job
from axsparse.runtime.process_memory import peak_memory_bytes
from axsparse.training.build import HEALED, build
from axsparse.training.export import export
from axsparse.training.trainer import Trainer

PAGE = "README.md"
UNTRAINED = (
    *("optimizer.name=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"),
    *("schedule.warmup_steps=0", "train.steps=1"),
)
"""Settings of a model that is evaluated or saved, and makes no step: state without moments."""


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
    trains: bool
    """Whether the pruned model is trained on for `train.steps`."""

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
            "train.eval_steps=all",
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
    dense = together(
        transport,
        lambda: load_config(order.config, order.overrides("samo.enabled=false", *UNTRAINED)),
    )
    still = () if order.trains else UNTRAINED
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
    if order.trains:
        with timings.of("training"):
            trainer.train()
    with timings.of("evaluation"):
        after = _loss_of(trainer)
    targets, state = trainer.parts.run.targets, trainer.state_bytes().total
    trainer.close()
    peaks = gather_texts(transport.world, transport.backoff, str(peak_memory_bytes()))

    def write() -> None:
        if not is_first or targets is None:
            return
        with timings.of("export"):
            summary = export(order.work / "run", "hf", order.out, force=True)
        kept = targets.kept()
        entries = sum(math.prod(shape) for shape in targets.shapes.values())
        facts = Facts(
            before, after, entries, sum(kept.values()), summary.nbytes, state, max(map(int, peaks))
        )
        text = page(order, pruned, facts, timings.seconds)
        write_page(order.out, text)
        print(text, flush=True)
        print(f"axsparse: wrote {order.out}", flush=True)

    together(transport, write)


def _built(
    job: Job, loaded: LoadedConfig, *, quiet: bool = False, resume: str | None = None
) -> Trainer:
    model = together(job.transport, lambda: named_model(loaded))
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
    peak_bytes: int
    """The most memory that a rank has had."""


def page(order: PruneOrder, loaded: LoadedConfig, facts: Facts, seconds: dict[str, float]) -> str:
    """The page about a pruned model, in Markdown."""
    pruning = loaded.config.pruning
    removed = 1 - facts.kept / facts.entries
    healed = "trained on" if order.trains else f"healed: {pruning.heal}"
    sparse = facts.export_bytes // 2 - 2 * (facts.entries - facts.kept) + facts.entries // 8
    figures: list[tuple[str, Callable[[float], str]]] = [
        ("validation loss", "{:.4f}".format),
        ("perplexity", lambda loss: f"{perplexity(loss):.3f}"),
    ]
    sizes = [
        ("safetensors, fp32: this folder", facts.export_bytes),
        (f"safetensors, bf16: axsparse export {order.work / 'run'} --trained", None),
        ("kept entries in bf16 and one bit an entry: axsparse ticket and training", sparse),
    ]
    lines = [
        f"# {order.out.name}",
        "",
        f"{order.source.name}, of whose pruned matrices {100 * removed:.1f} % of the entries are "
        f"zero (by {pruning.method}), {healed}.",
        "",
        "| | dense | pruned |",
        "|---|---|---|",
        *(f"| {name} | {show(facts.before)} | {show(facts.after)} |" for name, show in figures),
        "",
        "| weights in | bytes |",
        "|---|---|",
        *(f"| {name} | {format_bytes(n or facts.export_bytes / 2)} |" for name, n in sizes),
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
    ]
    return "\n".join(lines)
