"""Prunes a model of a Hugging Face folder, heals it, and writes a folder again, on all ranks.

Tokens are prepared, the model is pruned and healed one layer at a time, with held-out samples that
are evaluated before and after, and the folder is written from the layers' files; no rank ever has
the full model. Such a folder may then be trained, with its masks or while they rise. A model card
reports the result. A second start with the same arguments skips the steps that are done.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from torch import Tensor

from axsparse.cli.data import prepare_and_show
from axsparse.cli.parser import override, say
from axsparse.cli.prune_defaults import Work, chosen, plan_lines, rising, training_settings
from axsparse.cli.prune_order import BLOCKWISE, FACTS, PRUNED, PruneOrder, Schedule
from axsparse.config.hf_config import read_json
from axsparse.config.load import bundled_source
from axsparse.config.schema import Config, sample_length
from axsparse.config.validate import check_config, check_step
from axsparse.data.dataset import Datasets
from axsparse.data.documents import Reading
from axsparse.data.preparation import Request
from axsparse.data.sources import open_datasets
from axsparse.data.token_file import read_sidecar
from axsparse.data.tokenizers import ANOTHER_TOKENIZER
from axsparse.models.layer import Model
from axsparse.models.model_profile import profile
from axsparse.models.start_weights import FromFile
from axsparse.models.teacher import with_teacher
from axsparse.models.zoo.model_registry import model_without_weights, named_model
from axsparse.observe.metrics import perplexity
from axsparse.observe.watchdog.watchdog import watched
from axsparse.pruning.targets import find_targets
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import AxsparseError, DataError, writing
from axsparse.runtime.exchange import together, value_of_first
from axsparse.runtime.files.atomic import new_path
from axsparse.runtime.files.run_folder import ANOTHER_RUN_DIR, RESUME_AUTO
from axsparse.runtime.grid import RankCoords
from axsparse.runtime.job import Job
from axsparse.training.build import PrunedLayers, check_fits, owl_sparsities, prune_layers
from axsparse.training.checkpoint.verification import checkpoint_of
from axsparse.training.export import Weights, export, export_folder, with_card
from axsparse.training.plan import RunPlan
from axsparse.training.trainer import build

UNTRAINED = (
    *("optimizer.name=sgd", "optimizer.momentum=0", "optimizer.nesterov=false"),
    *("schedule.warmup_steps=0", "train.steps=1", "train.teacher=null"),
)
"""Settings of a model that is evaluated or saved, and makes no step: state without moments."""


OPTIONS = {
    "go on from there by --resume .*": "repeat the command with another --out",
    rf"{re.escape(RESUME_AUTO)} goes on from the last checkpoint": "the same command goes on",
    re.escape(RESUME_AUTO): "the same command",
    re.escape(ANOTHER_RUN_DIR): "another --out",
    re.escape(ANOTHER_TOKENIZER): "put its tokenizer's files next to its weights",
    "choose another folder, or remove this one": "bring those back, or choose another --out",
    "choose another place, or give --force .*": "move it away, and repeat the command",
    "--tokenizer: ": "--from: ",
    r" must be from 1 to \d+, since (there are \d+ tokens); change it, or": r", but \1;",
    "bring more of both": "bring more texts, more by --validation FILES, and choose another --out",
    "bring more data": "bring more texts, and choose another --out",
    "bring more held-out data": "name more by --validation FILES, and choose another --out",
    r", or let \S+( of the model)? begin anew \(model\.new: .*": "",
}
"""Suggestions and places in errors of data and of training, as `re.sub` takes them, and their names
in this command."""


@contextlib.contextmanager
def own_options() -> Iterator[None]:
    """Have errors name the options of this command."""
    try:
        yield
    except AxsparseError as error:
        error.args = (reworded(str(error)),)
        raise


def reworded(line: str) -> str:
    for there, here in OPTIONS.items():
        line = re.sub(there, here, line)
    return line


@own_options()
def prune_folder(job: Job, order: PruneOrder) -> None:
    """Do all that `axsparse prune` without `--dry-run` promises; all ranks call this together."""
    transport, job.reworded = job.transport, reworded
    is_first = transport.rank == 0
    order = together(transport, partial(chosen, order))
    lock = together(transport, lambda: order.take() if is_first else None)
    job.kept = f"what is finished is in {order.work}, and the same command continues"
    together(transport, lambda: _check_model(order, runs=is_first))  # before minutes of preparation
    together(transport, lambda: _prepare(order) if is_first else None)
    order, asked = together(transport, partial(_with_settings, order))
    together(transport, lambda: order.adopt(asked) if is_first else None)
    facts = (_trained if order.heal == "train" else _pruned)(job, order, asked)
    if is_first:
        say(card(order, asked, facts))
        say(f"axsparse: wrote {order.out}")
    if lock is not None:
        lock.release()


def _with_settings(order: PruneOrder) -> tuple[PruneOrder, Config]:
    """The order with the settings that follow from its tokens, and its configuration."""
    config = order.configured()
    tokens = read_sidecar(order.work / "tokens", "--out").train.tokens
    trains = order.heal == "train"
    training = training_settings(config, order.length(config), tokens) if trains else []
    order = replace(order, settings=(*training, *order.settings))
    config = order.configured()
    order = replace(order, settings=(*order.implied(config), *order.settings))
    return order, order.configured()


def _pruned(job: Job, order: PruneOrder, asked: Config) -> Facts:
    """Prune and heal one layer at a time, and write the folder, or the one that is trained."""
    transport = job.transport

    def of_layers() -> Config:
        config = together(transport, partial(order.configured, *order.of_layers(asked), *UNTRAINED))
        together(transport, partial(check_config, config))
        return config

    config = of_layers()
    length = order.length(asked)
    judged = together(transport, partial(order.configured, f"data.sequence_length={length}"))

    def opened() -> Datasets:
        """Samples of calibration, and held-out ones as the training has them."""
        later = open_datasets(judged)
        if order.heal == "train":  # before minutes of pruning
            check_step(asked, later.training.name, len(later.training))
        return replace(open_datasets(config), validation=later.validation)

    model = together(transport, lambda: named_model(config))
    page = partial(card, order, asked)
    if order.distribution == "owl":
        mean = asked.pruning.sparsity
        found = owl_sparsities(job, model, opened, config, mean, order.work)
        order = order.with_layers([f"{name}={value:.6f}" for name, value in found.items()])
        asked = together(transport, order.configured)
        config = of_layers()
    announce = partial(_announce, order, asked, transport)
    done = prune_layers(job, model, opened, config, order.work / "layers", announce)
    facts = _write_pruned(transport, order, _weights_of(model), done, page)
    return replace(facts, layers=asked.pruning.layers)


def _write_pruned(
    transport: Transport,
    order: PruneOrder,
    start: FromFile,
    done: PrunedLayers,
    page: Callable[[Facts], str],
) -> Facts:
    """Write the folder of a pruned model on rank 0, with its card unless it is trained."""
    targets = done.plan.targets
    assert targets is not None, "something is pruned"
    kept: dict[str, int] = {}
    beats: Callable[[], None]

    def read(layer: str, name: str) -> Tensor | None:
        beats()
        value = start.read(name)
        if value is not None and layer in done.pruned:
            value = done.healed.value(layer, name, value)
        if value is not None and name in targets.shapes:
            kept[name] = int(value.count_nonzero())
        return value

    def facts() -> Facts:
        """The results, once all values were read."""
        return Facts(
            before=done.before,
            after=done.after,
            held_out=done.held_out,
            entries=sum(map(math.prod, targets.shapes.values())),
            kept=sum(kept.values()),
            which=_without_layers(done.plan),
        )

    def write() -> None:
        if transport.rank:
            return
        named = start.dtype
        written = partial(export_folder, done.plan.config, done.plan.profile, read)
        if order.heal == "train":
            written(order.work / PRUNED, lambda _: torch.float32, named, force=True)
        else:
            written(order.out, named, named, lambda: with_card(page(facts()), order.source))

    with _watched_writing(order, done.plan.config, done.plan.coords, transport) as beats:
        together(transport, write)
    return replace(facts(), kept=value_of_first(transport, sum(kept.values())))


def _watched_writing(
    order: PruneOrder, config: Config, coords: RankCoords, transport: Transport
) -> contextlib.AbstractContextManager[Callable[[], None]]:
    return watched(
        *("writing", config.watchdog, order.work),
        coords=coords,
        transport=transport,
        reworded=reworded,
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
    if block_seconds is not None and pruned[0]:  # an embedding multiplies nothing
        size, length = plan.profile.flops / pruned[0], sample_length(plan.config)
        seconds = block_seconds / (3 * plan.config.batch.microbatch_size)  # with the backward
        work = Work(len(pruned), size, seconds, length, transport.size)
    for line in plan_lines(order, asked, work):
        say(f"axsparse: {line}")


def _weights_of(model: Model) -> FromFile:
    assert isinstance(model.start, FromFile), "the model is of a folder"
    return model.start


def _check_model(order: PruneOrder, *, runs: bool) -> None:
    """The errors of weights that are missing or of eight bits, and, where it runs them, of layers
    that do not run."""
    length = f"data.sequence_length={order.length(order.configured())}"
    model = named_model(order.configured(length))
    _reject_eight_bits(_weights_of(model))
    if runs:
        profile(model)


def _reject_eight_bits(start: FromFile) -> None:
    """DataError for matrices of eight bits, which torch does not compute with."""
    for name, there in start.names.items():
        kind, shape = start.dtype(name), start.file.shapes[there]
        if kind.is_floating_point and kind.itemsize == 1 and len(shape) > 1:
            shown = str(kind).removeprefix("torch.")
            raise DataError(
                f"{start.file.path}: {there!r} is {shown}, and a pruned folder has the types of "
                "the one before; write that in bf16: "
                "AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.bfloat16)"
                ".save_pretrained(OTHER)"
            )


def _trained(job: Job, order: PruneOrder, asked: Config) -> Facts:
    """Prune and heal one layer at a time, train, and write the folder."""
    transport = job.transport
    is_first, path = transport.rank == 0, order.work / FACTS
    page = partial(card, order, asked)
    if not together(transport, lambda: path.exists() and (order.work / PRUNED).exists()):
        _check_training(job, order, asked)
        found = _pruned(job, order, asked)

        def keep() -> None:
            if is_first:
                with writing(f"--out: {path}", "free the disk"), new_path(path) as unfinished:
                    unfinished.write_text(json.dumps(asdict(found)), encoding="utf-8")

        together(transport, keep)
    before = Facts(**together(transport, lambda: read_json(path, "remove it")))
    if order.distribution == "owl":
        order = order.with_layers(before.layers)
        asked = together(transport, order.configured)
    if order.schedule == "gradual" and _initial(order, asked, before) >= asked.pruning.sparsity:
        if is_first:
            say(f"axsparse: {100 * before.zeros:g} % is zero already, and masks do not rise")
        order = replace(order, schedule="once")
    settings = [
        override("model.from", order.work / PRUNED),
        *("pruning.heal=none", f"data.sequence_length={order.length(asked)}"),
        *_masks_of(order, asked, before),
    ]
    if asked.checkpoint.every == 0:  # The folder is written from the last checkpoint.
        settings += [f"checkpoint.every={asked.train.steps}", "checkpoint.keep_every=0"]
    config = together(transport, partial(order.configured, *settings))
    together(transport, partial(check_config, config))
    model = together(transport, lambda: named_model(config))
    trainer = build(job, model, partial(open_datasets, config), config, resume="auto")
    trainer.train()
    evaluation, targets = trainer.evaluate(), trainer.plan.targets
    assert targets is not None, "something is pruned"
    assert evaluation is not None, "`PruneOrder.adopt` rejects train.eval_steps 0"
    trainer.close()
    entries = sum(map(math.prod, targets.shapes.values()))
    facts = replace(
        before,
        after=evaluation.loss,
        pruned=before.after,
        entries=entries,
        schedule=order.schedule,
    )
    with _watched_writing(order, config, trainer.coords, transport) as beats:
        write = partial(_write_trained, order, facts, targets.shapes, page, beats)
        return together(transport, lambda: write() if is_first else facts)


def _write_trained(
    order: PruneOrder,
    facts: Facts,
    names: Iterable[str],
    page: Callable[[Facts], str],
    beats: Callable[[], None],
) -> Facts:
    """Write the folder of a trained model, with its card; returns the results with the number of
    entries that the named matrices keep."""
    run, kept = order.work / "run", 0
    weights = Weights(checkpoint_of(run, None), trained=False)
    for name in names:
        beats()
        kept += int(weights.dense(name).count_nonzero())
    facts = replace(facts, kept=kept)
    dtype_of = _weights_of(named_model(order.configured())).dtype

    def dtype(name: str) -> torch.dtype:
        beats()
        return dtype_of(name)

    export(run, "hf", order.out, dtype=dtype, card=with_card(page(facts), order.source))
    return facts


def _check_training(job: Job, order: PruneOrder, asked: Config) -> None:
    """The errors of a training that cannot begin, before layers are pruned, on all ranks alike: of
    a teacher that does not fit, and of a model that does not fit the memory."""
    length = f"data.sequence_length={order.length(asked)}"
    config = order.configured(length, "pruning.heal=none", "pruning.method=magnitude")

    def model() -> Model:
        model = model_without_weights(config)
        if config.train.teacher is None:
            return model
        return with_teacher(model, config, reads_weights=False)

    check_fits(job, together(job.transport, model), config)


def _masks_of(order: PruneOrder, asked: Config, facts: Facts) -> list[str]:
    """The settings by which a training keeps the zeros of a folder, or makes more and more."""
    if order.schedule == "once":
        zeros = f"pruning.sparsity={facts.zeros:.4f}"
        return ["pruning.method=zeros", zeros, *ZEROS_ALONE, *facts.which]
    return [*rising(asked), f"pruning.initial_sparsity={_initial(order, asked, facts):.4f}"]


def _initial(order: PruneOrder, asked: Config, facts: Facts) -> float:
    """The sparsity from which masks rise; OWL's sparsities have the mean asked for."""
    is_shared = asked.pruning.layers and order.distribution == "uniform"
    return BLOCKWISE if is_shared else facts.zeros


def _without_layers(plan: RunPlan) -> list[str]:
    """The settings by which the same matrices are pruned without `pruning.layers`: none unless it
    has added some."""
    pruning, targets = plan.config.pruning, plan.targets
    assert targets is not None, "something is pruned"
    bare = pruning.model_copy(update={"layers": (), "sparsity": 0.0, "pattern": None})
    if find_targets(plan.profile, bare).shapes.keys() >= targets.shapes.keys():
        return []
    every = find_targets(plan.profile, bare.model_copy(update={"include": "all", "exclude": ()}))
    others = [name for name in every.shapes if name not in targets.shapes]
    return ["pruning.include=all", f"pruning.exclude={json.dumps(others)}"]


def _prepare(order: PruneOrder) -> None:
    request = Request(
        inputs=order.data,
        out=order.work / "tokens",
        written=(order.work, order.out),
        validation=order.validation,
        validation_fraction=0.0 if order.validation else 0.05,
        tokenizer=order.source,
        separator=order.separator,
        reading=Reading(jsonl_field=order.jsonl_field),
    )
    prepare_and_show(request, len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Facts:
    """The results of the pruning."""

    before: float
    """The validation loss of the model of --from."""
    after: float
    """The validation loss of the pruned model."""
    held_out: int
    """The validation samples that the losses are of."""
    entries: int
    """The entries of the pruned matrices."""
    kept: int
    """The kept entries of the pruned matrices."""
    layers: Sequence[str] = ()
    """The sparsities of layers, as `pruning.layers` gives them."""
    which: Sequence[str] = ()
    """The settings by which its matrices are pruned without `pruning.layers`."""
    pruned: float | None = None
    """The validation loss of the pruned model before it was trained; None where it was not."""
    schedule: Schedule | None = "once"
    """The schedule of the training: masks with all zeros that are asked for do not rise."""

    @property
    def zeros(self) -> float:
        """The share of zeros in the pruned matrices, as `pruning.sparsity` takes it."""
        return min(round(1 - self.kept / self.entries, 4), 0.9999)


ZEROS_ALONE = (
    *("pruning.layers=[]", "pruning.pattern=null"),
    *("pruning.distribution=uniform", "pruning.heal=none"),
)
"""The settings of pruning that method zeros takes at these values alone, where a configuration of
the user's may have others."""

TRAINED_BY = ("data.sequence_length=", "batch.")
"""The settings of samples and batches, by which a user trains on as the folder was made."""
WHICH = ("pruning.include=", "pruning.exclude=")
"""The settings that say which matrices are pruned."""


def card(order: PruneOrder, config: Config, facts: Facts) -> str:
    """The model card of a pruned model, in Markdown."""
    removed = 1 - facts.kept / facts.entries
    how, *_ = plan_lines(replace(order, schedule=facts.schedule), config, None)
    data = ", ".join(map(str, order.data))
    # This page may become a part of the card of a folder that is made of this one.
    losses = {"before": facts.before, "before training": facts.pruned, "after": facts.after}
    found = {name: loss for name, loss in losses.items() if loss is not None}
    settings = (
        override("model.from", order.out),
        "data.source=tokens",
        override("data.path", order.work / "tokens"),
        "pruning.method=zeros",
        f"pruning.sparsity={facts.zeros:.4f}",
        *(ZEROS_ALONE if str(order.config) != bundled_source() else ()),
        *(each for each in order.settings if each.startswith(TRAINED_BY)),
        *(facts.which or (each for each in order.settings if each.startswith(WHICH))),
    )
    train = ["axsparse", "train", "--config", order.config, "--run-dir", f"{order.out}.trained"]
    return f"""\
# {order.out.name}

{order.source.absolute().name}, pruned by axsparse: {how}.
{100 * removed:.1f} % of the entries of the pruned matrices are zero.

Data: {data}; {config.pruning.calibration_samples} samples of calibration; seed {config.seed}.

| {facts.held_out} validation samples | {" | ".join(found)} |
|---|{"---|" * len(found)}
| validation loss | {" | ".join(f"{loss:.4f}" for loss in found.values())} |
| perplexity | {" | ".join(f"{perplexity(loss):.3f}" for loss in found.values())} |

The folder loads in transformers, whose kernels gain nothing from zeros. To train on with axsparse:

```
{shlex.join([*train, *(word for each in settings for word in ("--set", each))])}
```
"""
