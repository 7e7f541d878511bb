"""The defaults of `axsparse prune`, and the time that it takes.

The method, the healing and the distribution follow from the sparsity, the length of a training and
its batches from the number of tokens, its learning rate from the width of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from axsparse.cli.parser import override
from axsparse.cli.prune_order import BLOCKWISE, ONE_BY_ONE, Distribution, Heal, PruneOrder
from axsparse.config.hf_config import BUNDLED
from axsparse.config.model_config import HfConfig
from axsparse.config.schema import Config, final_sparsity
from axsparse.runtime.console import format_count, format_seconds
from axsparse.runtime.errors import ConfigError


@dataclass(frozen=True)
class Rule:
    """The defaults up to a sparsity."""

    up_to: float
    heal: Heal
    passes: int
    """How often a training sees the training data: up to four passes over a text are worth nearly
    as much as new text (Muennighoff et al. 2023, arXiv 2305.16264)."""
    distribution: Distribution = "uniform"
    rate: float = 0.2
    """Learning rate times hidden size: 5e-5 at 4,096, and inversely to the width, as steps of Adam
    have to be (Yang et al. 2022, arXiv 2203.03466)."""
    teacher_share: float = 1.0
    """The share of a teacher in the loss, `train.distillation_weight`."""


RULES = (
    Rule(0.55, "blocks", 1),
    Rule(0.65, "train", 2),
    Rule(1.0, "train", 4, "owl", rate=0.576, teacher_share=0.5),
)
"""By the figures of decision 49 and of docs/howto/llama.md."""
WANDA_UP_TO = 0.65
"""Up to here blocks heal Wanda's masks as well as SparseGPT's, which take longer; above not."""
MOST_TOKENS = 67_000_000
"""The tokens of a training, at most: ELSA's for 90 % of a Llama of 7B (2025)."""
LEAST_STEPS, LEAST_BATCH, MOST_BATCH = 400, 8, 128
"""Steps that a training has if its batches can be so small, and its sequences of a step."""
MOST_RATE = 1e-3
"""The largest learning rate."""
WARM_UP = 20
"""One step in this number warms up."""
RISES = 16
"""Prunings of a rising mask, over half of the steps."""
MODEL = "SmolLM2 135M"
MEASURED: Mapping[str, Mapping[float, float]] = {
    "blocks": {0.5: 1.24, 0.6: 1.53, 0.7: 2.07, 0.8: 3.64, 0.9: 9.05},
    "train": {0.5: 1.17, 0.6: 1.34, 0.7: 1.61, 0.8: 2.31},
    "mixed": {0.7: 1.29, 0.8: 1.67, 0.9: 2.89},
    "gradual": {0.6: 1.77, 0.7: 3.59, 0.8: 41.7, 0.9: 119.0},
}
"""Perplexity over the dense model's of English text, by healing (a training whose masks rise is
"gradual", one by texts and a teacher alike "mixed") and sparsity, for `MODEL`:
benchmarks/results/smollm2_healed.md, smollm2_recovered.md."""
RECIPES = {
    "blocks": "blocks alone",
    "train": "SparseGPT, blocks, and 393,000 tokens with a teacher",
    "mixed": "SparseGPT, blocks, and 1 to 1.6M tokens, by a teacher and the texts alike",
    "gradual": "blocks at 50 %, and 393,000 tokens with a teacher",
}
"""The healing of `MEASURED`, for a user whose training is shorter or has no teacher."""


def rule_of(sparsity: float) -> Rule:
    """The rule for a sparsity below 1."""
    return next(rule for rule in RULES if sparsity <= rule.up_to)


def chosen(order: PruneOrder) -> PruneOrder:
    """The order with a method, a healing and a schedule; ConfigError if they do not fit."""
    config = order.configured()
    if config.model.new:
        raise ConfigError(
            f"{config.where('model.new')}: a pruned folder has all weights of --from; leave it "
            "out, or prune what axsparse train, with it, and axsparse export --to hf have made"
        )
    reject_full_model(config)
    sparsity = final_sparsity(config.pruning)
    rule = rule_of(sparsity)
    asks = any(text.startswith(("train.steps=", "train.teacher=")) for text in order.settings)
    heal = order.heal or ("train" if asks else rule.heal)
    can_rise = heal == "train" and config.pruning.pattern is None
    schedule = order.schedule or "once"
    if schedule == "gradual" and not (can_rise and sparsity > BLOCKWISE):
        raise ConfigError(
            f"--schedule: gradual rises from {BLOCKWISE:g} while the model trains, and this "
            f"is --heal {heal} to {sparsity:g}; choose once, or --heal train, more --sparsity, and "
            "no pattern"
        )
    keys = ("pruning.pattern", "pruning.layers", "pruning.distribution")
    given = [key for key in keys if not _is_free(config, key)]
    if given and order.distribution == "owl":
        raise ConfigError(
            f"--distribution: owl sets each layer's sparsity, and so does {given[0]}; leave one out"
        )
    settings = []
    method = config.pruning.method
    if _is_free(config, "pruning.method"):
        first = BLOCKWISE if schedule == "gradual" else sparsity
        method = "wanda" if first <= WANDA_UP_TO else "sparsegpt"
        settings.append(f"pruning.method={method}")
    sees_inputs = method in ("wanda", "sparsegpt") and not given
    distribution = order.distribution or (rule.distribution if sees_inputs else "uniform")
    settings.append(f"pruning.heal={'none' if heal == 'none' else 'blocks'}")
    if heal == rule.heal == "train" and order.heal is None:
        settings.append(override("train.teacher", order.source))
    order = replace(order, heal=heal, schedule=schedule, distribution=distribution)
    return replace(order, settings=(*settings, *order.settings))


def reject_full_model(config: Config) -> None:
    """ConfigError for masks that cannot be drawn for one layer after the other."""
    pruning = config.pruning
    rules = {
        "pruning.method": pruning.method not in ONE_BY_ONE,
        "pruning.distribution": pruning.distribution == "global",
        "pruning.mask": pruning.mask is not None,
        "layout.g_tensor": config.layout.g_tensor > 1,
    }
    if odd := [key for key, is_broken in rules.items() if is_broken]:
        raise ConfigError(
            f"prune: each layer is pruned by itself, by {', '.join(ONE_BY_ONE)}; leave "
            f"{' and '.join(odd)} out, or prune by axsparse train with model.from, and export"
        )


def training_settings(config: Config, length: int, tokens: int) -> list[str]:
    """The settings, which nobody has given, of a training on `tokens` tokens in samples of
    `length` tokens."""
    rule = rule_of(final_sparsity(config.pruning))
    total = min(rule.passes * tokens, MOST_TOKENS)
    batch, steps = config.batch.global_batch_size, config.train.steps
    if _is_free(config, "batch.global_batch_size"):
        batch = MOST_BATCH
        while batch > LEAST_BATCH and total < LEAST_STEPS * batch * length:
            batch //= 2
    if _is_free(config, "train.steps"):
        steps = max(WARM_UP, round(total / (batch * length)))
    settings: dict[str, object] = {"batch.global_batch_size": batch, "train.steps": steps}
    width = _width(config)
    if width is not None:
        settings["optimizer.learning_rate"] = f"{min(rule.rate / width, MOST_RATE):.2g}"
    if config.train.teacher is not None:
        settings["train.distillation_weight"] = rule.teacher_share
    settings["schedule.warmup_steps"] = steps // WARM_UP
    settings["train.eval_every"] = max(1, steps // 4)
    settings["checkpoint.every"] = max(1, steps // 8)
    return [f"{key}={value}" for key, value in settings.items() if _is_free(config, key)]


def rising(config: Config) -> list[str]:
    """The settings by which masks rise between a quarter and three quarters of the steps, which is
    the best window of the scaling laws of sparse pretraining (arXiv 2501.12486)."""
    begin, until = config.train.steps // 4, 3 * config.train.steps // 4
    settings = {"pruning.method": "gradual", "pruning.at_step": begin}
    if until <= begin:
        raise ConfigError(
            f"train.steps: {config.train.steps}, in which no mask can rise; choose at least 2, or "
            "--schedule once"
        )
    if config.pruning.until_step == "auto":
        settings["pruning.until_step"] = until
    if _is_free(config, "pruning.interval"):
        settings["pruning.interval"] = max(1, (until - begin) // RISES)
    if _is_free(config, "pruning.eval_steps"):
        settings["pruning.eval_steps"] = 1
    return [f"{key}={value}" for key, value in settings.items()]


def _is_free(config: Config, key: str) -> bool:
    """Whether nobody has given a setting: the bundled configuration counts as nobody, another file
    of its name does not."""
    return config.origins.get(key, f"{BUNDLED}:").startswith(f"{BUNDLED}:")


def _width(config: Config) -> int | None:
    """The width of the residual stream; None if the model has another name for it."""
    model = config.model
    if not isinstance(model, HfConfig):
        return model.hidden_size
    settings = {**model.hf, **model.hf.get("text_config", {})}
    found = settings.get("hidden_size", settings.get("n_embd"))
    return found if isinstance(found, int) else None


# -- what is said before it begins ----------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """The size of a model in pruned layers, and the time of one of them on this machine."""

    layers: int
    """The number of pruned layers."""
    size: float
    """The products of the model, relative to the products of a pruned layer."""
    seconds: float
    """Seconds of the forward of a pruned layer, for one sample of calibration."""
    length: int
    """Tokens of that sample."""
    ranks: int = 1

    def of_layers(self, config: Config) -> float:
        """Seconds of pruning and healing, layer by layer: 5 forwards for inputs, statistics and
        errors, and as many as three forwards for each step, whose update takes as long as one."""
        pruning = config.pruning
        forwards = 5 + (4 * pruning.heal_passes if pruning.heal != "none" else 0)
        return forwards * pruning.calibration_samples * self.layers * self.seconds

    def of_training(self, config: Config, length: int) -> float:
        """Seconds of a training on all ranks: three forwards for each sample, one more that is
        recomputed, and one of the teacher."""
        forwards = 3 + bool(config.pipeline.checkpoint_activations) + bool(config.train.teacher)
        samples = config.train.steps * config.batch.global_batch_size * length / self.length
        return forwards * samples * self.size * self.seconds / self.ranks


def plan_lines(order: PruneOrder, config: Config, work: Work | None) -> Iterator[str]:
    """Lines about what is done, how long it takes, and how good it was elsewhere."""
    pruning = config.pruning
    sparsity, trains = final_sparsity(pruning), order.heal == "train"
    length = order.length(config)
    rises = order.schedule == "gradual"
    parts = [f"{pruning.method} to {100 * (BLOCKWISE if rises else sparsity):g} %"]
    parts += ["sparsities by OWL"] * (order.distribution == "owl")
    parts += ["blocks are healed"] * (pruning.heal == "blocks")
    if trains:
        tokens = config.train.steps * config.batch.global_batch_size * length
        to = f", rising to {100 * sparsity:g} %" if rises else ""
        teacher = config.train.teacher
        taught = f", taught by {Path(teacher).absolute().name}" if teacher else ""
        parts.append(
            f"{config.train.steps:,} steps ({format_count(tokens)} tokens, learning rate "
            f"{config.optimizer.learning_rate:g}){to}{taught}"
        )
    line = "; ".join(parts)
    if work is not None:
        seconds = work.of_layers(config) + (work.of_training(config, length) if trains else 0)
        line += f"; about {format_seconds(seconds)} on this machine"
    yield line
    healing: str = "gradual" if rises else order.heal or "none"
    if healing == "train" and rule_of(sparsity).teacher_share < 1:
        healing = "mixed"
    measured = MEASURED.get(healing, {})
    nearest = min(measured, key=lambda at: abs(at - sparsity), default=None)
    if nearest is not None and math.isclose(nearest, sparsity, abs_tol=0.05):
        at_once = f", {MEASURED['blocks'][nearest]:g} after {RECIPES['blocks']}" * rises
        yield (
            f"{MODEL} had {measured[nearest]:g} times the perplexity of dense at "
            f"{100 * nearest:g} % after {RECIPES[healing]}{at_once}"
        )
    else:
        blocks = ", ".join(f"{r:g} at {100 * at:g} %" for at, r in MEASURED["blocks"].items())
        yield (
            f"not measured yet at {100 * sparsity:g} %; {MODEL} had {blocks} times the perplexity "
            f"of dense after {RECIPES['blocks']}"
        )
