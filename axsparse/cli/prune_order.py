"""The request to `axsparse prune`, its defaults, its time, and the folder that keeps its work.

The method, the healing and the schedule follow from the sparsity, the length of a training and its
batches from the number of tokens, its learning rate from the width of the model.

`OUT.run` has the tokens, the layers or the run, and `order.json`: the settings that determine the
result. One process at a time has it, and a start that would continue the training of another order
is rejected.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from axsparse.cli.parser import override
from axsparse.config.hf_config import BUNDLED, read_json
from axsparse.config.load import configure
from axsparse.config.messages import shorten
from axsparse.config.model_config import HfConfig
from axsparse.config.schema import Config, PruningConfig, prunes, sample_length
from axsparse.models.start_weights import fingerprint, open_weights
from axsparse.runtime.console import format_count, format_seconds
from axsparse.runtime.errors import ConfigError, writing
from axsparse.runtime.files.atomic import new_path, remove_unfinished
from axsparse.runtime.files.run_folder import RunLock
from axsparse.training.checkpoint.verification import MEANS, START, flat, steps_in
from axsparse.training.export import CARD, is_export

ORDER, PRUNED, FACTS = "order.json", "pruned", "pruned.json"
"""The names in the folder of the work of the settings of the training, of the pruned folder that is
trained, and of its figures."""
Heal = Literal["none", "blocks", "train"]
"""The healing after the pruning; `train` heals blocks, and trains the model on for
`train.steps`."""
Schedule = Literal["once", "gradual"]
"""Whether a training keeps its masks, or they rise from `BLOCKWISE` while it goes on."""
BLOCKWISE = 0.5
"""The sparsity at which blocks leave a model nearly as it was (decision 49)."""
SHORT = 256
"""Tokens of a sample for calibration and healing: more and shorter ones heal better than fewer and
longer ones of as many tokens (decision 49)."""
TRAINED = 1024
"""Tokens of a sample where all entries are trained, as the study has them."""
ONE_BY_ONE = ("magnitude", "random", "wanda", "sparsegpt")
"""Methods that prune a layer without looking at the layers after it."""


@dataclass(frozen=True)
class PruneOrder:
    """A request to `axsparse prune`."""

    source: Path
    """The Hugging Face folder of the dense model."""
    data: tuple[Path, ...]
    """Files and folders of text, for calibration, healing and training."""
    validation: tuple[Path, ...]
    """Files and folders of text to evaluate on; without any, a twentieth of `data`."""
    out: Path
    """The folder that is written; next to it, `OUT.run` has the tokens and the run."""
    config: str
    settings: tuple[str, ...]
    """Overrides KEY=VALUE, of which later ones win."""
    heal: Heal | None
    """None lets `chosen` decide, as it does for the next two."""
    schedule: Schedule | None = None
    method: str | None = None
    """The value of `pruning.method`; None also if a configuration has it."""

    @property
    def work(self) -> Path:
        """The folder of the tokens and of the run."""
        # `.` and `..` have no name to add to.
        named = self.out if self.out.name.strip(".") else self.out.resolve()
        return named.parent / f"{named.name}.run"

    def overrides(self, *more: str) -> list[str]:
        """The settings of one of the runs."""
        return [
            override("model.from", self.source),
            "data.source=tokens",
            override("data.path", self.work / "tokens"),
            override("run_dir", self.work / "run"),
            "pruning.at_step=0",
            *self.settings,
            *more,
        ]

    def configured(self, *more: str) -> Config:
        """The configuration of one of the runs."""
        return configure(self.config, self.overrides(*more)).as_part()

    def length(self, config: Config) -> int:
        """Tokens of a sample of training and evaluation: fewer than a model's longest sequence,
        which takes more memory and time than it is worth."""
        if config.data.sequence_length != "auto":
            return config.data.sequence_length
        return min(sample_length(config), TRAINED if self.heal == "train" else SHORT)

    def implied(self, config: Config, batch: int) -> Sequence[str]:
        """The settings that the order gives unless they are given: as many held-out as calibration
        samples, in steps of `batch`, and the length of samples."""
        implied = []
        if self.config == BUNDLED:
            batches = -(-config.pruning.calibration_samples // batch)
            implied.append(f"train.eval_steps={batches}")
        if config.data.sequence_length == "auto" and self.heal != "train":
            implied.append(f"data.sequence_length={self.length(config)}")
        return implied

    def of_layers(self, config: Config) -> Sequence[str]:
        """The settings by which layers are pruned before a training: short samples, and the
        sparsity from which masks rise."""
        settings = []
        if config.data.sequence_length == "auto":
            settings.append(f"data.sequence_length={min(sample_length(config), SHORT)}")
        if self.schedule == "gradual":
            share = BLOCKWISE / config.pruning.sparsity
            entries = (entry.rpartition("=") for entry in config.pruning.layers)
            layers = [f"{pattern}={share * float(value):.4f}" for pattern, _, value in entries]
            settings += [f"pruning.sparsity={BLOCKWISE}", f"pruning.layers={json.dumps(layers)}"]
        return settings

    def take(self) -> RunLock:
        """Reserve the folder of the work for this process, and remove unfinished files of killed
        ones.

        ConfigError if the place is taken, OutputError if it cannot be written, InUseError if
        another process has it.
        """
        if not self.out.resolve().name:
            raise ConfigError(f"--out: {self.out} is no place for a folder; choose another one")
        if self.out.resolve() == self.source.resolve():
            raise ConfigError(f"--out: {self.out} is the model itself; choose another place")
        taken = ConfigError(
            f"--out: {self.out} is there already; remove it, or choose another place "
            f"(what was begun stays in {self.work})"
        )
        is_there = self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir()))
        if is_there and not (self.work / ORDER).exists():
            raise taken
        with writing(f"--out: the work in {self.work}", "choose another place"):
            self.work.mkdir(parents=True, exist_ok=True)
        lock = RunLock(self.work, "--out")
        for path in (self.out, self.out / CARD, self.work / ORDER, self.work / PRUNED):
            remove_unfinished(path)
        # An export without a page comes from a start that was killed between the two.
        if is_there and not is_export(self.out):
            lock.release()
            raise taken
        return lock

    def adopt(self, config: Config) -> None:
        """Write down the settings that determine the result; where something is trained already,
        compare them.

        ConfigError for the first difference, and for settings that prune or evaluate nothing. Files
        of pruned layers carry their own fingerprint, and layers are pruned again by other settings.
        """
        pruning = config.pruning
        if not (prunes(pruning) and config.samo.enabled):
            raise ConfigError(
                "pruning.sparsity: nothing is pruned at 0, or with samo.enabled: false; choose "
                "more, and leave samo.enabled out"
            )
        if config.train.eval_steps == 0:
            raise ConfigError("train.eval_steps: 0 judges nothing; choose at least 1")
        asked = [text for text in self.settings if text.startswith("pruning.sparsity=")]
        if asked and not math.isclose(pruning.sparsity, final_sparsity(pruning)):
            raise ConfigError(
                f"pruning.sparsity: {pruning.sparsity}, but pruning.pattern {pruning.pattern} "
                f"makes it {final_sparsity(pruning):g}; leave one of them out"
            )
        decides = self._decides(config)
        path = self.work / ORDER
        if not (path.exists() and steps_in(self.work / "run")):
            with writing(f"--out: {path}", "free the disk"), new_path(path) as unfinished:
                unfinished.write_text(json.dumps(decides), encoding="utf-8")
            return
        begun = read_json(path)
        for key, new in decides.items():
            if begun.get(key) != new:
                old = shorten(repr(begun.get(key)))
                raise ConfigError(
                    f"{key}: {shorten(repr(new))}, but what is in {self.work} was begun with "
                    f"{old}; set it back, choose another --out, or remove {self.work}"
                )

    def _decides(self, config: Config) -> dict[str, Any]:
        """All settings that determine the result; token files carry their own fingerprint."""
        settings = flat(config.model_dump(mode="json"))
        return {
            "weights of --from": fingerprint(*open_weights(self.source).files),
            "--heal": self.heal,
            "--schedule": self.schedule,
            **{key: settings[key] for key in settings if not key.startswith((*MEANS, *START))},
        }


def final_sparsity(pruning: PruningConfig) -> float:
    """The sparsity that a pattern, or the settings, ask for."""
    if pruning.pattern is None:
        return pruning.sparsity
    kept, of = map(int, pruning.pattern.split(":"))
    return 1 - kept / of


# -- defaults -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """The defaults up to a sparsity."""

    up_to: float
    heal: Heal
    schedule: Schedule
    """The schedule of a training."""
    passes: int
    """How often a training sees the training data."""


RULES = (
    # At 50 % blocks leave 1.24 times the perplexity, at a tenth of the cost of training.
    Rule(0.55, "blocks", "once", 1),
    # At 60 % they leave 1.53 times, and a mask that rises costs no more than one that is drawn.
    Rule(0.65, "train", "gradual", 2),
    # At 70 % they leave 2.07 times. Up to four passes over a text are worth nearly as much as new
    # text (Muennighoff et al. 2023, arXiv 2305.16264).
    Rule(1.0, "train", "gradual", 4),
)
WANDA_UP_TO = 0.65
"""Up to here blocks heal Wanda's masks as well as SparseGPT's, which take longer; above not."""
MOST_TOKENS = 67_000_000
"""The tokens of a training, at most: ELSA's for 90 % of a Llama of 7B (2025)."""
LEAST_STEPS, LEAST_BATCH, MOST_BATCH = 400, 8, 128
"""Steps that a training has if its batches can be so small, and its sequences of a step."""
RATE_BY_WIDTH, MOST_RATE = 0.2, 1e-3
"""Learning rate times hidden size, and the largest rate: 5e-5 at 4,096, and inversely to the width,
as steps of Adam have to be (Yang et al. 2022, arXiv 2203.03466)."""
WARM_UP = 20
"""One step in this number warms up."""
RISES = 16
"""Prunings of a rising mask, over half of the steps."""
MODEL = "SmolLM2 135M"
MEASURED: Mapping[Heal, Mapping[float, float]] = {"blocks": {0.5: 1.24, 0.6: 1.53, 0.7: 2.07}}
"""Perplexity over the dense model's of English text, by healing and sparsity, for `MODEL`:
benchmarks/results/smollm2_healed.md."""


def rule_of(sparsity: float) -> Rule:
    """The rule for a sparsity below 1."""
    return next(rule for rule in RULES if sparsity <= rule.up_to)


def chosen(order: PruneOrder) -> PruneOrder:
    """The order with a method, a healing and a schedule; ConfigError if they do not fit."""
    config = order.configured()
    reject_full_model(config)
    sparsity = final_sparsity(config.pruning)
    rule = rule_of(sparsity)
    asks = any(text.startswith(("train.steps=", "train.teacher=")) for text in order.settings)
    heal = order.heal or ("train" if asks else rule.heal)
    can_rise = heal == "train" and config.pruning.pattern is None
    schedule = order.schedule or (rule.schedule if can_rise else "once")
    if schedule == "gradual" and not (can_rise and sparsity > BLOCKWISE):
        raise ConfigError(
            f"--schedule: gradual rises from {BLOCKWISE:g} while the model trains, and this "
            f"is --heal {heal} to {sparsity:g}; choose once, or --heal train, more --sparsity, and "
            "no pattern"
        )
    settings = []
    if order.method is not None or _is_free(config, "pruning.method"):
        first = BLOCKWISE if schedule == "gradual" else sparsity
        method = order.method or ("wanda" if first <= WANDA_UP_TO else "sparsegpt")
        settings.append(f"pruning.method={method}")
    settings.append(f"pruning.heal={'none' if heal == 'none' else 'blocks'}")
    if schedule == "gradual" and order.heal is None:
        settings.append(override("train.teacher", order.source))
    return replace(order, heal=heal, schedule=schedule, settings=(*settings, *order.settings))


def reject_full_model(config: Config) -> None:
    """ConfigError for masks that cannot be drawn for one layer after the other."""
    pruning = config.pruning
    if (
        pruning.method not in ONE_BY_ONE
        or pruning.distribution == "global"
        or pruning.mask is not None
        or config.layout.g_tensor > 1
    ):
        raise ConfigError(
            f"prune: each layer is pruned by itself, by {', '.join(ONE_BY_ONE)}; leave "
            "pruning.distribution, pruning.mask and layout.g_tensor out, or prune by axsparse "
            "train with model.from, and export"
        )


def training_settings(config: Config, length: int, tokens: int) -> Iterator[str]:
    """The settings, which nobody has given, of a training on `tokens` tokens in samples of
    `length` tokens."""
    total = min(rule_of(final_sparsity(config.pruning)).passes * tokens, MOST_TOKENS)
    batch = config.batch.global_batch_size
    if _is_free(config, "batch.global_batch_size"):
        batch = MOST_BATCH
        while batch > LEAST_BATCH and total < LEAST_STEPS * batch * length:
            batch //= 2
        yield f"batch.global_batch_size={batch}"
    steps = config.train.steps
    if _is_free(config, "train.steps"):
        steps = max(WARM_UP, round(total / (batch * length)))
        yield f"train.steps={steps}"
    width = _width(config)
    if _is_free(config, "optimizer.learning_rate") and width is not None:
        yield f"optimizer.learning_rate={min(RATE_BY_WIDTH / width, MOST_RATE):.2g}"
    for key, value in (
        ("schedule.warmup_steps", steps // WARM_UP),
        ("train.eval_every", max(1, steps // 4)),
        ("checkpoint.every", max(1, steps // 8)),
    ):
        if _is_free(config, key):
            yield f"{key}={value}"


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
    """Whether nobody has given a setting: the bundled configuration counts as nobody."""
    return config.origins.get(key, BUNDLED).startswith(BUNDLED)


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
    """The products of a model, and the time of some of them on this machine."""

    block_flops: float
    """Flops of the forward of a pruned layer, for one sample of calibration."""
    blocks: int
    """The number of pruned layers."""
    model_flops: float
    """Flops of the forward of the model, for one sample of calibration."""
    length: int
    """Tokens of that sample."""
    block_seconds: float
    """Seconds of a forward and a backward of a pruned layer for it."""
    ranks: int = 1

    @property
    def seconds_per_flop(self) -> float:
        return self.block_seconds / (3 * self.block_flops)

    def of_layers(self, config: Config) -> float:
        """Seconds of pruning and healing, layer by layer: 5 forwards for inputs, statistics and
        errors, and as many as three forwards for each step, whose update takes as long as one."""
        pruning = config.pruning
        forwards = 5 + (4 * pruning.heal_passes if pruning.heal != "none" else 0)
        samples = pruning.calibration_samples
        return forwards * samples * self.blocks * self.block_flops * self.seconds_per_flop

    def of_training(self, config: Config, length: int) -> float:
        """Seconds of a training on all ranks: three forwards for each sample, one more that is
        recomputed, and one of the teacher."""
        forwards = 3 + bool(config.pipeline.checkpoint_activations) + bool(config.train.teacher)
        samples = config.train.steps * config.batch.global_batch_size * length / self.length
        return forwards * samples * self.model_flops * self.seconds_per_flop / self.ranks


def plan_lines(order: PruneOrder, config: Config, work: Work | None) -> Iterator[str]:
    """Lines about what is done, how long it takes, and how good it was elsewhere."""
    pruning = config.pruning
    sparsity, trains = final_sparsity(pruning), order.heal == "train"
    length = order.length(config)
    rises = order.schedule == "gradual"
    parts = [f"{pruning.method} to {100 * (BLOCKWISE if rises else sparsity):g} %"]
    parts += ["blocks are healed"] * (pruning.heal == "blocks")
    if trains:
        tokens = config.train.steps * config.batch.global_batch_size * length
        to = f", rising to {100 * sparsity:g} %" if rises else ""
        taught = ", taught by the dense model" if config.train.teacher else ""
        parts.append(
            f"{config.train.steps:,} steps ({format_count(tokens)} tokens, learning rate "
            f"{config.optimizer.learning_rate:g}){to}{taught}"
        )
    line = "; ".join(parts)
    if work is not None:
        seconds = work.of_layers(config) + (work.of_training(config, length) if trains else 0)
        line += f"; about {format_seconds(seconds)} on this machine"
    yield line
    measured = MEASURED.get(order.heal or "none", {})
    nearest = min(measured, key=lambda at: abs(at - sparsity), default=None)
    if nearest is not None and math.isclose(nearest, sparsity, abs_tol=0.05):
        yield (
            f"{MODEL} had {measured[nearest]:g} times the perplexity of dense after this at "
            f"{100 * nearest:g} %"
        )
    else:
        blocks = ", ".join(f"{r:g} at {100 * at:g} %" for at, r in MEASURED["blocks"].items())
        yield (
            f"not measured yet at {100 * sparsity:g} %; {MODEL} had {blocks} times the perplexity "
            "of dense after blocks alone"
        )
