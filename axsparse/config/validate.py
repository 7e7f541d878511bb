"""Rules between sections, and between a configuration and the ranks and data of its run."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Iterator

from axsparse.config.hf_config import NO_KIND, unused_dropout
from axsparse.config.messages import show
from axsparse.config.model_config import HfConfig
from axsparse.config.schema import ONCE, Config, final_sparsity, num_microbatches, prunes
from axsparse.config.section import counted
from axsparse.runtime.errors import ConfigError, DataError
from axsparse.runtime.files.run_folder import CONFIG_FILE
from axsparse.runtime.grid import Grid

SMALL_DATA = 10
"""Batches that data have to hold so that passing over them again needs no remark."""
BY_HAND = ("Trainer", "config", "--set")
"""The origins of settings that somebody has written for this run alone; files serve several."""
DISTANCES = 5
"""Distances between masks in a row that have to be small before an Early-Bird mask is drawn."""
STAGING_BYTES = 1e9
"""Memory of each rank for copies of a checkpoint on their way to the disk; a step waits for the
disk only if a rank has more to save."""
ONLY_WITH = (
    ("optimizer.name", ("adamw", "lamb"), ("betas", "eps")),
    ("optimizer.name", ("sgd",), ("momentum", "nesterov")),
    ("schedule.decay", ("cosine", "linear"), ("decay_steps", "final_ratio")),
    ("schedule.decay", ("step",), ("step_every", "step_factor")),
    ("pruning.method", ("early-bird", "gradual", "iterative"), ("interval", "until_step")),
    ("pruning.method", ("early-bird",), ("threshold",)),
    ("pruning.method", ("gradual",), ("initial_sparsity",)),
    ("pruning.heal", ("blocks",), ("heal_passes", "heal_batch", "heal_rate")),
    ("train.teacher", (), ("distillation_weight", "distillation_temperature")),
    ("train.eval_steps", (), ("eval_every", "eval_first")),
    ("samo.enabled", (), ("index", "weights", "sparse_products")),
    ("precision", ("fp16",), ("loss_scale.initial", "loss_scale.growth_interval")),
)
"""A setting, the values with which others have an effect (if none are listed, all but null, 0 and
false, without which others that are 0 or false say the same), and these others, of its section or
with theirs."""

REPLACED = {
    "the model of the program": (
        *("model.name", "model.from", "model.weights", "model.new", "model.hf", "model.num_*"),
        *("model.hidden_size", "model.tie_embeddings", "model.dropout"),
    ),
    "the data of the program": (
        *("data.source", "data.path", "data.blend", "data.validation", "data.sequence_length"),
    ),
    "the learning rate of the program": ("schedule.*",),
    "the optimizer of the program": ("optimizer.name", "optimizer.momentum", "optimizer.nesterov"),
    "pruning.pattern": ("pruning.sparsity",),
    "pruning.mask": (
        *("pruning.method", "pruning.sparsity", "pruning.pattern", "pruning.layers"),
        *("pruning.include", "pruning.exclude", "pruning.distribution", "pruning.at_step"),
        *("pruning.initial_sparsity", "pruning.interval", "pruning.until_step"),
    ),
}
"""Objects of a program, and a setting, and the settings that each replaces, by pattern."""
OF_RUN_DIR = ("run_dir", "checkpoint.*", "logging.*", "train.trace")
"""The settings, by pattern, that a run without a run directory does not look at."""


def check_config(config: Config) -> None:
    """ConfigError for the first broken rule that needs nothing but the configuration."""
    for key, why in _without_effect(config):
        if config.origins.get(key) in BY_HAND:
            value = _plain(config.by_key()[key])
            raise ConfigError(f"{config.where(key)}: {value} {why}; leave it out")
    for is_broken, key, said in (*_model_rules(config), *_training_rules(config)):
        if is_broken:
            raise ConfigError(f"{config.where(key)}: {said}")
    if config.layout.g_inter != "auto":
        _check_split_length(config, config.layout.g_inter)


Rule = tuple[bool, str, str]
"""Whether a rule is broken; the key; the value, why it cannot be, and a suggestion."""


def _model_rules(config: Config) -> Iterator[Rule]:
    model, fused = config.model, config.pipeline.compile
    if isinstance(model, HfConfig):
        yield "model_type" not in model.hf, "model.hf", NO_KIND
        yield (
            fused is True,
            "pipeline.compile",
            "true, but torch.compile does not follow the forward of transformers, by which layers "
            "get their masks and positions; choose false",
        )
    else:
        yield (
            config.data.intra_document_attention,
            "data.intra_document_attention",
            f"true, but tokens of model.name {model.name} see all tokens before them; choose "
            "false, or a model of transformers",
        )
    length, longest = config.data.sequence_length, model.sequence_length
    yield (
        length != "auto" and length > longest,
        "data.sequence_length",
        f"{length} is above model.sequence_length {longest}; choose at most {longest}, or auto",
    )
    yield (
        config.train.teacher is not None and fused not in (False, "auto"),
        "pipeline.compile",
        f"{str(fused).lower()}, but the loss of train.teacher is not fused; choose false",
    )


def _training_rules(config: Config) -> Iterator[Rule]:
    pruning, steps = config.pruning, config.train.steps
    made, key = final_sparsity(pruning), "pruning.sparsity"
    yield (
        pruning.mask is None
        and config.origins.get(key) in (*BY_HAND, "prune")
        and not math.isclose(pruning.sparsity, made, abs_tol=0.005),
        key,
        f"{pruning.sparsity:g}, but pruning.pattern {pruning.pattern} makes it {made:g}; leave one "
        "of them out",
    )
    if config.samo.enabled and prunes(pruning) and pruning.mask is None:
        until = "auto" if pruning.method in ONCE else pruning.until_step
        rounds = {"gradual": 1, "iterative": 1, "early-bird": DISTANCES}.get(pruning.method, 0)
        last = steps // 2 if until == "auto" else min(until, steps - 1)
        most = last - rounds * pruning.interval if rounds else steps - 1
        yield (
            pruning.at_step >= steps,
            "pruning.at_step",
            f"{pruning.at_step} is not below train.steps {steps}; "
            + (f"choose at most {most}" if most >= 0 else "raise train.steps"),
        )
        yield (
            until != "auto" and not pruning.at_step < until < steps,
            "pruning.until_step",
            f"{until} is not between pruning.at_step {pruning.at_step} and train.steps {steps}; "
            "choose one in between, or auto",
        )
    yield (
        config.samo.zero_stage == 3 and config.samo.weights == "dense",
        "samo.zero_stage",
        "3 gathers weights that are sparse at rest, and samo.weights is dense; "
        f"{'set samo.weights to sparse or auto, or ' if config.samo.enabled else ''}choose 1",
    )
    # Not for `auto`: a short trial of a long run, by --steps 5, may end within its warm-up.
    end, warm_up = config.schedule.decay_steps, config.schedule.warmup_steps
    yield (
        end != "auto" and warm_up > end,
        "schedule.warmup_steps",
        f"{warm_up} is above schedule.decay_steps {end}; choose at most {end}",
    )
    yield (
        config.checkpoint.keep_best and config.train.eval_steps == 0,
        "checkpoint.keep_best",
        "true, but train.eval_steps 0 never evaluates; set train.eval_steps, and give validation "
        "data, or choose false",
    )


def remarks(config: Config, samples: int) -> Iterator[str]:
    """Lines about settings that can be run, but may not be meant.

    `config` has every `auto` decided, `samples` is the number of training samples.
    """
    for key, why in _without_effect(config):
        if config.origins[key] != "configure":  # as every `auto` is that was decided
            yield f"note: {config.where(key)} {why}"
    if config.checkpoint.keep_every and not config.checkpoint.every:
        yield (
            "note: with checkpoint.every 0, checkpoint.keep_every keeps checkpoints of signals, "
            "checkpoint.keep_best and Trainer.save alone"
        )
    if "model.dropout" not in config.origins and (dropped := unused_dropout(config.model)):
        yield (
            f"note: {config.where('model.from')} has {dropped}, without which this model trains; "
            "set model.dropout, or model.name to hf"
        )
    steps, warm_up = config.train.steps, config.schedule.warmup_steps
    if warm_up > steps:
        yield (
            f"note: the warm-up of {counted(warm_up, 'step')} is longer than the run, so that the "
            "learning rate does not reach its peak (schedule.warmup_steps)"
        )
    batch = config.batch.global_batch_size
    passes = steps * batch / samples
    if samples < SMALL_DATA * batch and passes >= 2:
        yield (
            f"note: {counted(steps, 'step')} of {batch} samples go {passes:.3g} times over the "
            f"data, which has {samples} (train.steps, batch.global_batch_size)"
        )


def replaced(config: Config, given: Iterable[str]) -> Iterator[str]:
    """Lines about settings that have no effect; `given` are keys of `REPLACED`."""
    # The search of early-bird begins after the warm-up, under any learning rate.
    pruning = config.pruning
    searches = pruning.method == "early-bird"
    chosen = ["pruning.mask"] if pruning.mask is not None else []
    if not math.isclose(pruning.sparsity, final_sparsity(pruning)):
        chosen.append("pruning.pattern")
    for one in (*given, *chosen):
        keys = _set_keys(config, REPLACED[one])
        keys = [key for key in keys if not (searches and key == "schedule.warmup_steps")]
        if keys:
            yield f"note: no effect, replaced by {one}: {', '.join(map(config.where, keys))}"


def reject_quiet(config: Config) -> None:
    """ConfigError if the call that makes a quiet run asks for files of its run directory."""
    values = config.by_key()
    for key in _set_keys(config, OF_RUN_DIR):
        if values[key] and config.origins[key] == "Trainer":
            raise ConfigError(
                f"{config.where(key)}: {_plain(values[key])} is for the run directory, and a "
                "quiet run has none; leave one of them out"
            )


def _set_keys(config: Config, patterns: Iterable[str]) -> list[str]:
    """The settings of some patterns that somebody has set to other values than their defaults."""
    values, usual, origins = config.by_key(), Config().by_key(), config.origins
    return [
        key
        for pattern in patterns
        for key in fnmatch.filter(values, pattern)
        if origins.get(key, "configure") != "configure"
        and values[key] != usual.get(key)
        # The config.yaml of a run has the decisions of every `auto`.
        and not (usual.get(key) == "auto" and origins[key].startswith(f"{CONFIG_FILE}:"))
    ]


def _without_effect(config: Config) -> Iterator[tuple[str, str]]:
    """Settings other than their defaults that nothing in the run looks at, and why."""
    values, usual, origins = config.by_key(), Config().by_key(), config.origins
    for rule, with_these, leaves in ONLY_WITH:
        value, section = values[rule], rule.partition(".")[0]
        if value in with_these or (not with_these and value):
            continue
        if section == "pruning" and not (config.samo.enabled and prunes(config.pruning)):
            continue
        for key in (leaf if "." in leaf else f"{section}.{leaf}" for leaf in leaves):
            is_set = key in origins and values[key] != usual[key]
            if is_set and (with_these or values[key]):
                needed = f"for {rule} {' or '.join(with_these)}" if with_these else f"for {rule}"
                yield key, f"has no effect: it is {needed}, and {rule} is {_plain(value)}"
    if values["samo.gradient"] == "half" and config.precision == "fp32":
        yield "samo.gradient", "has no effect: it is for precision bf16 or fp16, and it is fp32"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else show(value)


def check_offload(config: Config, *, has_gpu: bool) -> None:
    if config.samo.offload and not has_gpu:
        raise ConfigError(
            f"{config.where('samo.offload')}: true takes state off a GPU, and there is none; "
            "choose false"
        )


def check_rounds(loaded: Config, config: Config) -> None:
    """ConfigError if steps and intervals leave pruning over time nothing to do.

    `config` is `loaded` with every `auto` decided.
    """
    pruning, where = config.pruning, loaded.where("pruning.interval")
    begin, until, every = pruning.at_step, pruning.until_step, pruning.interval
    assert until != "auto"
    end = f"pruning.until_step {until}"
    often = "step" if every == 1 else f"{every} steps"
    if loaded.pruning.until_step == "auto":
        end += f" (auto, by train.steps {config.train.steps})"
    if pruning.method in ("gradual", "iterative") and begin + every > until:
        way = f"choose at most {until - begin}"
        if until == begin:
            way = "choose a smaller pruning.at_step, more train.steps or a later pruning.until_step"
        raise ConfigError(
            f"{where}: an interval of {counted(every, 'step')} does not fit between "
            f"pruning.at_step {begin} and {end}; {way}"
        )
    first = max(begin, config.schedule.warmup_steps)
    last = first + DISTANCES * every
    if pruning.method == "early-bird" and last > until:
        most, least = (until - first) // DISTANCES, first + DISTANCES
        way = f"choose at most {most}"
        if most < 1:
            way = f"choose 1, a pruning.until_step from {least} on, and more train.steps than that"
        raise ConfigError(
            f"{where}: {DISTANCES + 1} looks, one every {often} from step {first} on (after "
            f"warm-up and pruning.at_step), end at {last}, after {end}; {way}"
        )


def check_split(config: Config, g_inter: int, num_layers: int) -> None:
    """ConfigError unless a given split has `g_inter` entries and places every layer."""
    _check_split_length(config, g_inter)
    split = config.layout.split
    if split != "auto" and sum(split) != num_layers:
        raise ConfigError(
            f"{config.where('layout.split')}: {list(split)} places {counted(sum(split), 'layer')} "
            f"of {num_layers}, embedding and head included; "
            f"choose entries that add up to {num_layers}"
        )


def check_batch(config: Config, grid: Grid) -> None:
    """ConfigError unless every replica gets a microbatch."""
    batch = config.batch
    microbatches = num_microbatches(batch)
    if microbatches < grid.g_data:
        total, size = batch.global_batch_size, batch.microbatch_size
        small = (total - 1) // (grid.g_data - 1)
        smaller = f"at most {small} as batch.microbatch_size, " if small else ""
        raise ConfigError(
            f"{config.where('batch.global_batch_size')}: {total} in microbatches of {size} makes "
            f"{microbatches} for {counted(grid.g_data, 'replica')}; choose "
            f"at least {(grid.g_data - 1) * size + 1}, {smaller}or at most {microbatches} as "
            "layout.g_data, by fewer ranks or more stages"
        )


def check_data(config: Config, *, source: str, words: int | None, vocab_size: int) -> None:
    """ConfigError for a vocabulary larger than the model's, whose size is `words`, if it has one;
    `source` names the data in messages."""
    if words is not None and words < vocab_size:
        suggestion = f"choose at least {vocab_size}"
        if config.model.from_ or config.model.weights:  # whose rows are as many as they are
            suggestion = (
                "take data of the model's own tokenizer, or give the model as many rows by "
                f"resize_token_embeddings({vocab_size}) of transformers"
            )
        raise ConfigError(
            f"{config.where('model.vocab_size')}: {words} is below the vocabulary of {source}, "
            f"{vocab_size}; {suggestion}"
        )


def check_step(config: Config, source: str, num_samples: int) -> None:
    """DataError if the training samples, which `source` names, are fewer than a step's."""
    batch = config.batch.global_batch_size
    if num_samples < batch:
        raise DataError(
            f"{source}: {counted(num_samples, 'sample')} cannot fill a step of "
            f"{config.where('batch.global_batch_size')} {batch}; take more data, or a smaller batch"
        )


def _check_split_length(config: Config, g_inter: int) -> None:
    split = config.layout.split
    if split != "auto" and len(split) != g_inter:
        raise ConfigError(
            f"{config.where('layout.split')}: {list(split)} is for "
            f"{counted(len(split), 'stage')}, g_inter is {g_inter}; "
            f"choose {g_inter} entries, or auto"
        )
