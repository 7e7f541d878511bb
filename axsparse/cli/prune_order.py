"""The request to `axsparse prune`, and the folder that keeps its work between starts.

`OUT.run` has the tokens, the layers or the run, and `order.json`: the settings that determine the
result. One process at a time has it, and a start that would continue the training of another order
is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from axsparse.cli.parser import override
from axsparse.config.hf_config import read_json
from axsparse.config.load import bundled_source, configure
from axsparse.config.messages import shorten
from axsparse.config.schema import Config, prunes, sample_length
from axsparse.config.section import flat
from axsparse.data.documents import Reading
from axsparse.data.token_file import read_sidecar
from axsparse.models.start_weights import fingerprint, open_weights
from axsparse.runtime.errors import ConfigError, DataError, writing
from axsparse.runtime.files.atomic import UNFINISHED, new_path, remove_unfinished
from axsparse.runtime.files.paths import is_own, reject_within
from axsparse.runtime.files.run_folder import LOCK_FILE, RunLock
from axsparse.training.checkpoint.verification import MEANS, START, steps_in

ORDER, PRUNED, FACTS = "order.json", "pruned", "pruned.json"
"""The names in the folder of the work of the settings of the training, of the pruned folder that is
trained, and of its figures."""
_KEY = "axsparse prune"
"""Begins the settings, which are the mark of the work: they are written before anything else."""
LEADING = (
    *("pruning.sparsity", "pruning.method", "data.sequence_length"),
    *("batch.global_batch_size", "train.steps"),
)
"""The settings from which others follow that nobody gives: they are compared first."""
Heal = Literal["none", "blocks", "train"]
"""The healing after the pruning; `train` heals blocks, and trains the model on for
`train.steps`."""
Schedule = Literal["once", "gradual"]
"""Whether a training keeps its masks, or they rise from `BLOCKWISE` while it goes on."""
Distribution = Literal["uniform", "owl"]
"""Whether all layers have one sparsity, or fewer entries stay where fewer are outliers
(`outliers`)."""
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
    """None lets `prune_defaults` choose, as it does for the next two."""
    schedule: Schedule | None = None
    distribution: Distribution | None = None
    separator: str | None = None
    """The token after each document; None for the tokenizer's end of a text."""
    jsonl_field: str = Reading.jsonl_field
    """The key of the text, chat or ids in a record."""

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

    def with_layers(self, layers: Sequence[str]) -> PruneOrder:
        """The order with sparsities of layers, in the form of `pruning.layers`."""
        return replace(self, settings=(*self.settings, f"pruning.layers={json.dumps([*layers])}"))

    def length(self, config: Config) -> int:
        """Tokens of a sample of training and evaluation: fewer than a model's longest sequence,
        which takes more memory and time than it is worth."""
        if config.data.sequence_length != "auto":
            return config.data.sequence_length
        return min(sample_length(config), TRAINED if self.heal == "train" else SHORT)

    def implied(self, config: Config) -> Sequence[str]:
        """The settings that the order gives unless they are given: as many held-out as calibration
        samples, and the length of samples."""
        implied = []
        if self.config == bundled_source():
            batches = -(-config.pruning.calibration_samples // config.batch.global_batch_size)
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
        with writing(f"--out: {self.out}", "choose another place"):
            out, work = self.out.resolve(), self.work
            is_there = self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir()))
        if not out.name or out == Path.cwd():
            raise ConfigError(f"--out: {self.out} is no place for a new folder; choose another one")
        reject_within(self.out, self.source, "the model")
        if out in (path.resolve() for path in (*self.data, *self.validation)):
            raise ConfigError(f"--out: {self.out} is the data itself; choose another place")
        if is_there or self.out.is_symlink():
            raise ConfigError(
                f"--out: {self.out} is there already; move it away, or choose another place"
            )
        with writing(f"--out: the work in {work}", "choose another place"):
            work.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in work.iterdir()} - {LOCK_FILE}
            is_new = all(name.startswith(f".{ORDER}{UNFINISHED}") for name in names)
            is_ours = is_new or is_own(work / ORDER, f'{{"{_KEY}": ')
        if not is_ours:
            raise ConfigError(
                f"--out: {work}, which would have the work, has {min(names)}, and no {ORDER} of "
                "this command; move it away, or choose another --out"
            )
        lock = RunLock(work, "--out")
        for path in (self.out, work / ORDER, work / PRUNED):
            remove_unfinished(path)
        if is_new:
            _write_order(work, {})
        return lock

    def adopt(self, config: Config) -> None:
        """Write down the settings and the tokens that determine the result; where something is
        trained already, compare them.

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
        decides = self._decides(config)
        path = self.work / ORDER
        begun: Mapping[str, Any] = {}
        with suppress(DataError):  # A damaged one is of another order.
            begun = read_json(path)
        changed = next((key for key, new in decides.items() if begun.get(key) != new), None)
        if changed is None:
            return
        if steps_in(self.work / "run"):
            new, old = (shorten(repr(values.get(changed))) for values in (decides, begun))
            raise ConfigError(
                f"{changed}: {new}, but what is in {self.work} was begun with {old}; set it back, "
                f"choose another --out, or remove {self.work}"
            )
        _write_order(self.work, decides)

    def _decides(self, config: Config) -> dict[str, Any]:
        """All settings, weights and tokens that determine the result."""
        settings = flat(config.model_dump(mode="json"))
        tokens = read_sidecar(self.work / "tokens", "--out")
        return {
            "weights of --from": fingerprint(*open_weights(self.source).files),
            **{f"{split} tokens": record.digest for split, record in tokens.splits()},
            **{key: settings[key] for key in LEADING},
            "--heal": self.heal,
            "--schedule": self.schedule,
            "--distribution": self.distribution,
            **{key: settings[key] for key in settings if not key.startswith((*MEANS, *START))},
        }


def _write_order(work: Path, decides: Mapping[str, Any]) -> None:
    """Write an order's mark and its settings, and remove the figures of the order before."""
    with writing(f"--out: {work / ORDER}", "free the disk"):
        (work / FACTS).unlink(missing_ok=True)
        with new_path(work / ORDER) as unfinished:
            unfinished.write_text(json.dumps({_KEY: 1, **decides}), encoding="utf-8")
