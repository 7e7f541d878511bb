"""Rules between fields, and between a configuration and the ranks and data of its run."""

from __future__ import annotations

from collections.abc import Iterable
from math import isqrt

from axsparse.config.load import LoadedConfig
from axsparse.config.model_config import CnnConfig, LlamaConfig, TextFamily, head_width
from axsparse.config.schema import Config, prunes
from axsparse.runtime.errors import ConfigError, DataError
from axsparse.runtime.grid import Grid

DISTANCES = 5
"""Distances between masks in a row that have to be small before an Early-Bird ticket is drawn."""
ONCE = ("magnitude", "random", "custom", "zeros", "wanda", "sparsegpt", "snip")
"""Pruning methods that draw one mask and keep it."""


def check_config(loaded: LoadedConfig) -> None:
    """ConfigError for the first broken rule that needs nothing but the configuration."""
    config = loaded.config
    if isinstance(config.model, TextFamily):
        _check_text_model(loaded, config.model)
    if config.data.source == "images" and config.data.path is None:
        raise ConfigError(
            f"{loaded.where('data.path')}: data.source images needs the folder that holds "
            "train/<class>/ and val/<class>/; set data.path"
        )
    if config.data.source == "tokens" and config.data.path is None:
        raise ConfigError(
            f"{loaded.where('data.path')}: data.source tokens needs the folder that `axsparse data "
            "prepare` wrote; set data.path"
        )
    _check_source_fits_model(loaded)
    _check_numbers(loaded)
    if config.samo.enabled and prunes(config.pruning) and config.pruning.ticket is None:
        _check_pruning(loaded)
    if config.samo.split_master and config.precision != "bf16":
        raise ConfigError(
            f"{loaded.where('samo.split_master')}: {config.precision} weights are not the upper "
            "half of fp32 masters; choose precision bf16, or false"
        )
    if config.model.new and config.model.weights is None and config.model.from_ is None:
        raise ConfigError(
            f"{loaded.where('model.new')}: {list(config.model.new)}, but no weights are loaded, so "
            "that all of the model is new; set model.from or model.weights, or leave it out"
        )
    _check_checkpoints(loaded)
    _check_backwards(loaded)
    if config.layout.g_inter != "auto":
        _check_split_length(loaded, config.layout.g_inter)


def _check_numbers(loaded: LoadedConfig) -> None:
    """ConfigError for numbers of schedule, loss scale and optimizer that contradict each other."""
    config, schedule = loaded.config, loaded.config.schedule
    # Not for `auto`: a short trial of a long run, by --steps 5, may end within its warm-up.
    if schedule.decay_steps != "auto" and schedule.warmup_steps > schedule.decay_steps:
        raise ConfigError(
            f"{loaded.where('schedule.warmup_steps')}: {schedule.warmup_steps} is above "
            f"schedule.decay_steps {schedule.decay_steps}; choose at most {schedule.decay_steps}"
        )
    scale = config.loss_scale
    if scale.initial < scale.floor:
        raise ConfigError(
            f"{loaded.where('loss_scale.initial')}: {scale.initial:g} is below loss_scale.floor "
            f"{scale.floor:g}, so that an overflow would raise it; choose at least {scale.floor:g}"
        )
    if config.optimizer.nesterov and config.optimizer.momentum == 0:
        raise ConfigError(
            f"{loaded.where('optimizer.nesterov')}: true with optimizer.momentum 0, which has "
            "nothing to look ahead by; set optimizer.momentum above 0, 0.9 say, or this to false"
        )


def _check_checkpoints(loaded: LoadedConfig) -> None:
    """ConfigError for a best checkpoint where no evaluation is ever made."""
    config = loaded.config
    if config.checkpoint.keep_best and config.train.eval_steps == 0:
        raise ConfigError(
            f"{loaded.where('checkpoint.keep_best')}: true, but train.eval_steps 0 never "
            "evaluates; set train.eval_steps, or choose false"
        )


def _check_text_model(loaded: LoadedConfig, model: TextFamily) -> None:
    if model.hidden_size % model.num_heads and not (
        isinstance(model, LlamaConfig) and model.head_dim is not None
    ):
        raise ConfigError(
            f"{loaded.where('model.num_heads')}: {model.num_heads} does not divide "
            f"model.hidden_size {model.hidden_size}; "
            f"choose {one_of(divisors(model.hidden_size), near=model.num_heads)}"
        )
    length = loaded.config.data.sequence_length
    if length != "auto" and length > model.sequence_length:
        raise ConfigError(
            f"{loaded.where('data.sequence_length')}: {length} is above "
            f"model.sequence_length {model.sequence_length}; "
            f"choose at most {model.sequence_length}, or auto"
        )
    if isinstance(model, LlamaConfig):
        _check_llama(loaded, model)
    elif loaded.config.data.separate_documents:
        raise ConfigError(
            f"{loaded.where('data.separate_documents')}: true, but tokens of model.name "
            f"{model.name} see all tokens before them; choose false, or model.name llama"
        )


def _check_llama(loaded: LoadedConfig, model: LlamaConfig) -> None:
    if model.num_key_value_heads is not None and model.num_heads % model.num_key_value_heads:
        raise ConfigError(
            f"{loaded.where('model.num_key_value_heads')}: {model.num_key_value_heads} does not "
            f"divide model.num_heads {model.num_heads}; "
            f"choose {one_of(divisors(model.num_heads), near=model.num_key_value_heads)}"
        )
    width = head_width(model)
    if width % 2:
        raise ConfigError(
            f"{loaded.where('model.head_dim')}: rotary embeddings turn pairs, and {width} is odd; "
            "choose an even number"
        )
    if model.rope_low_factor >= model.rope_high_factor:
        raise ConfigError(
            f"{loaded.where('model.rope_low_factor')}: {model.rope_low_factor:g} is not below "
            f"model.rope_high_factor {model.rope_high_factor:g}, so that no wavelength would lie "
            f"between long and short; choose less than {model.rope_high_factor:g}"
        )


def check_gpu_settings(loaded: LoadedConfig, *, has_gpu: bool) -> None:
    """ConfigError for the first setting that needs a GPU, if ranks train without one."""
    train = loaded.config.train
    for name, is_set in (("nvtx", train.nvtx), ("memory_history", train.memory_history)):
        if is_set and not has_gpu:
            raise ConfigError(
                f"{loaded.where(f'train.{name}')}: true looks into a GPU, and the ranks train "
                "without one; choose false"
            )
    check_offload(loaded, has_gpu=has_gpu)


def check_offload(loaded: LoadedConfig, *, has_gpu: bool) -> None:
    """ConfigError if state is to be offloaded from a GPU and there is none."""
    if loaded.config.samo.offload and not has_gpu:
        raise ConfigError(
            f"{loaded.where('samo.offload')}: true takes state off a GPU, and there is none; "
            "choose false"
        )


def _check_pruning(loaded: LoadedConfig) -> None:
    config = loaded.config
    pruning, steps = config.pruning, config.train.steps
    if pruning.at_step >= steps:
        raise ConfigError(
            f"{loaded.where('pruning.at_step')}: {pruning.at_step} is not below "
            f"train.steps {steps}; choose at most {steps - 1}"
        )
    if pruning.until_step != "auto" and not pruning.at_step < pruning.until_step < steps:
        raise ConfigError(
            f"{loaded.where('pruning.until_step')}: {pruning.until_step} is not between "
            f"pruning.at_step {pruning.at_step} and train.steps {steps}; choose one in between, or "
            "auto"
        )
    if pruning.pattern is not None and pruning.method not in ONCE:
        raise ConfigError(
            f"{loaded.where('pruning.pattern')}: {pruning.pattern} is drawn once, and "
            f"pruning.method {pruning.method} draws again; choose one of {', '.join(ONCE)}"
        )
    if pruning.pattern is not None and pruning.layers:
        raise ConfigError(
            f"{loaded.where('pruning.layers')}: sparsities of their own, but a pattern keeps as "
            "much everywhere; leave one of them out, or use pruning.exclude"
        )
    if pruning.pattern is not None and pruning.distribution != "uniform":
        raise ConfigError(
            f"{loaded.where('pruning.distribution')}: {pruning.distribution}, but a pattern keeps "
            "as much everywhere; choose uniform, or leave pruning.pattern out"
        )
    moves = pruning.method in ("set", "rigl")
    if pruning.method in ("zeros", "wanda", "sparsegpt"):
        _check_before_first_step(loaded)
    if moves and pruning.at_step:
        raise ConfigError(
            f"{loaded.where('pruning.at_step')}: {pruning.at_step}, but pruning.method "
            f"{pruning.method} starts from a sparse network; choose 0"
        )
    if moves and pruning.rewarm_steps:
        raise ConfigError(
            f"{loaded.where('pruning.rewarm_steps')}: {pruning.rewarm_steps}, but pruning.method "
            f"{pruning.method} changes the mask all the time; choose 0"
        )
    rewinds = pruning.rewind_step not in ("auto", "never")
    if rewinds and (moves or pruning.method == "gradual"):
        raise ConfigError(
            f"{loaded.where('pruning.rewind_step')}: {pruning.rewind_step}, but "
            f"pruning.method {pruning.method} goes on with the weights it has; choose never"
        )
    if isinstance(pruning.rewind_step, int) and pruning.rewind_step > pruning.at_step:
        raise ConfigError(
            f"{loaded.where('pruning.rewind_step')}: {pruning.rewind_step} is above "
            f"pruning.at_step {pruning.at_step}, the first pruning; choose at most that"
        )


def _check_before_first_step(loaded: LoadedConfig) -> None:
    """ConfigError for a setting that a method of the first weights does not follow."""
    pruning = loaded.config.pruning
    for key, value, wanted in (
        ("at_step", pruning.at_step, 0),
        ("distribution", pruning.distribution, "uniform"),
        ("layers", list(pruning.layers) if pruning.method == "zeros" else [], []),
    ):
        if value != wanted:
            raise ConfigError(
                f"{loaded.where(f'pruning.{key}')}: {value}, but pruning.method {pruning.method} "
                f"draws its masks tensor by tensor before the first step; choose {wanted}"
            )


def check_rounds(loaded: LoadedConfig, config: Config) -> None:
    """ConfigError if steps and intervals leave pruning over time nothing to do.

    `config` is that of `loaded` with every `auto` decided.
    """
    pruning, where = config.pruning, loaded.where("pruning.interval")
    begin, until, every = pruning.at_step, pruning.until_step, pruning.interval
    assert until != "auto"
    end = f"pruning.until_step {until}"
    if loaded.config.pruning.until_step == "auto":
        end += f" (auto, by train.steps {config.train.steps})"
    if pruning.method in ("gradual", "iterative") and begin + every > until:
        raise ConfigError(
            f"{where}: {every} steps do not fit between pruning.at_step {begin} and "
            f"{end}; choose at most {max(until - begin, 1)}"
        )
    if pruning.method in ("set", "rigl") and every >= until:
        raise ConfigError(
            f"{where}: {every} steps bring no move before {end}; choose at "
            f"most {max(until - 1, 1)}, or train longer"
        )
    first = max(begin, config.schedule.warmup_steps)
    last = first + DISTANCES * every
    if pruning.method == "early-bird" and last > until:
        raise ConfigError(
            f"{where}: {DISTANCES + 1} looks, one every {every} steps from step {first} on (after "
            f"warm-up and pruning.at_step), end at {last}, after {end}; "
            "look more often, or search longer"
        )


def check_split(loaded: LoadedConfig, g_inter: int, num_layers: int) -> None:
    """ConfigError unless a given split has `g_inter` entries and places every layer."""
    _check_split_length(loaded, g_inter)
    split = loaded.config.layout.split
    if split != "auto" and sum(split) != num_layers:
        raise ConfigError(
            f"{loaded.where('layout.split')}: {list(split)} places {counted(sum(split), 'layer')} "
            f"of {num_layers}, embedding and head included; "
            f"choose entries that add up to {num_layers}"
        )


def check_batch(loaded: LoadedConfig, grid: Grid) -> None:
    """ConfigError unless every replica gets the same number of whole microbatches."""
    total, size = loaded.config.batch.global_batch_size, loaded.config.batch.microbatch_size
    replicas = counted(grid.g_data, "replica")
    share, rest = divmod(total, grid.g_data)
    if rest:
        below, above = total - rest, total - rest + grid.g_data
        sizes = f"{below} or {above}" if below else f"{above}"
        raise ConfigError(
            f"{loaded.where('batch.global_batch_size')}: {total} does not divide evenly over "
            f"{replicas} ({total} = {replicas} × {share} + {rest}); choose {sizes}, "
            f"or as layout.g_data {one_of(divisors(total), near=grid.g_data)}"
        )
    if share % size:
        raise ConfigError(
            f"{loaded.where('batch.microbatch_size')}: {size} does not divide the "
            f"{counted(share, 'sequence')} of a replica ({total} = {replicas} × {share}); "
            f"choose {one_of(divisors(share), near=size)}"
        )


def check_data(
    loaded: LoadedConfig, *, source: str, words: int | None, vocab_size: int, num_samples: int
) -> None:
    """ConfigError for a vocabulary larger than the model's, DataError for less than one step.

    `source` names the data in messages; `words` is the size of the model's vocabulary, if it
    has one; `num_samples` counts the training sequences.
    """
    batch = loaded.config.batch.global_batch_size
    if words is not None and words < vocab_size:
        raise ConfigError(
            f"{loaded.where('model.vocab_size')}: {words} is below the vocabulary of {source}, "
            f"{vocab_size}; choose at least {vocab_size}"
        )
    if num_samples < batch:
        raise DataError(
            f"{source}: {counted(num_samples, 'sample')} cannot fill a step of "
            f"{loaded.where('batch.global_batch_size')} {batch}; take more data, "
            "a smaller batch or a smaller data.sequence_length"
        )


def _check_source_fits_model(loaded: LoadedConfig) -> None:
    """ConfigError for texts with an image model, or images with other channels than the model's."""
    model, source = loaded.config.model, loaded.config.data.source
    is_text = isinstance(model, TextFamily)
    wanted = ("stdlib", "tokens") if is_text else ("digits", "images")
    if source not in wanted:
        raise ConfigError(
            f"{loaded.where('data.source')}: {source} is nothing that model.name {model.name} can "
            f"read; choose {' or '.join(wanted)}, or another model"
        )
    if is_text:
        return
    has = {"digits": 1, "images": 3}[source]
    takes = model.channels if isinstance(model, CnnConfig) else 3
    if has != takes:
        raise ConfigError(
            f"{loaded.where('data.source')}: {source} have {has} channels, model.name {model.name} "
            f"takes {takes}; choose data.source {'images' if takes == 3 else 'digits'}, "
            f"or model.name cnn with model.channels {has}"
        )


def _check_backwards(loaded: LoadedConfig) -> None:
    """ConfigError if backwards have to be both split and whole."""
    pipeline = loaded.config.pipeline
    if pipeline.split_backward is True and pipeline.compile:
        raise ConfigError(
            f"{loaded.where('pipeline.split_backward')}: true, but pipeline.compile fuses each "
            "layer's backward into one; choose auto, which leaves it whole, or set "
            "pipeline.compile to false"
        )


def _check_split_length(loaded: LoadedConfig, g_inter: int) -> None:
    split = loaded.config.layout.split
    if split != "auto" and len(split) != g_inter:
        raise ConfigError(
            f"{loaded.where('layout.split')}: {list(split)} is for "
            f"{counted(len(split), 'stage')}, g_inter is {g_inter}; "
            f"choose {g_inter} entries, or auto"
        )


def check_divides_ranks(
    loaded: LoadedConfig, key: str, count: int, ranks: int, choices: Iterable[int]
) -> None:
    """ConfigError unless `count`, the value of `key`, divides the ranks; `choices` would."""
    if ranks % count:
        more = ranks + -ranks % count
        start = counted(more, "rank")
        if ranks == 1:
            start += f" (mpirun -n {more} before the same command)"
        raise ConfigError(
            f"{loaded.where(key)}: {count} does not divide the {counted(ranks, 'rank')}; "
            f"start {start} or choose {one_of(choices, near=count)}"
        )


def divisors(number: int) -> list[int]:
    """All divisors of a number of up to ten digits, in order; some of a larger one."""
    most = min(isqrt(number), 100_000)
    small = [divisor for divisor in range(1, most + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def one_of(choices: Iterable[int], *, near: int) -> str:
    """The eight choices nearest to `near`, in words."""
    nearest = sorted(sorted(choices, key=lambda choice: abs(choice - near))[:8])
    listed = ", ".join(map(str, nearest))
    return f"one of {listed}" if len(nearest) > 1 else listed


def counted(number: int, noun: str) -> str:
    """A number and its noun, such as "1 rank" or "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
