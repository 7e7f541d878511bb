"""Whether a run may resume from a checkpoint: it needs the same model, data and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from axsparse.config.load import LoadedConfig
from axsparse.config.schema import ONCE, Config
from axsparse.models.survey import Survey
from axsparse.runtime.errors import ConfigError, DataError
from axsparse.training.checkpoint.manifest import DataEntry
from axsparse.training.checkpoint.verification import Checkpoint

FREE = (
    *("layout.", "pipeline.", "checkpoint.", "transport", "run_dir", "data.path", "data.workers"),
    *("train.steps", "train.eval_", "train.log_every", "train.peak_flops"),
    *("train.trace", "train.nvtx", "train.memory_history", "train.compare_replicas_every"),
    *("watchdog.", "observe.", "pruning.calibration_samples"),
    *("samo.index", "samo.split_master", "samo.shard_optimizer", "samo.offload"),
    "samo.sparse_products",
)
"""Keys, or beginnings of keys, whose values may change: at most they change the order of sums."""
TOLD = (
    *("optimizer.learning_rate", "optimizer.betas", "optimizer.eps", "optimizer.weight_decay"),
    *("optimizer.clip_norm", "optimizer.nesterov", "schedule.", "loss_scale.", "train.threads"),
    *("spikes.", "samo.gradient", "pruning.rewarm_steps"),
)
"""Keys that may change and are printed if they do, since later steps then compute other values."""
START = ("model.from", "model.weights", "model.new")
"""Keys that say what the first weights are. Those of a checkpoint replace them, so that another
path may be given, which is printed."""


def refuse_other_model(checkpoint: Checkpoint, survey: Survey) -> None:
    """DataError if the parameters or layers of the model differ from those of the checkpoint."""
    there = {
        name: entry.shape
        for layer in checkpoint.manifest.layers.values()
        for name, entry in layer.parameters.items()
    }
    here = {
        parameter.name: parameter.shape
        for layer in survey.layers
        for parameter in layer.parameters
        if parameter.name not in survey.ties
    }
    for name in [*here, *there]:
        if here.get(name) != there.get(name):
            raise DataError(
                f"checkpoint {checkpoint.path}: {name}: {_shape(there.get(name))} was saved, the "
                f"model has {_shape(here.get(name))}; set the model's settings back, or start "
                "another run"
            )
    layers = [layer.name for layer in survey.layers]
    if layers != list(checkpoint.manifest.layers):
        raise DataError(
            f"checkpoint {checkpoint.path}: its layers are {', '.join(checkpoint.manifest.layers)}"
            f", the model's are {', '.join(layers)}; start another run"
        )


def refuse_other_data(checkpoint: Checkpoint, data: DataEntry) -> None:
    """DataError if the training data differ from those of the checkpoint; their path may differ."""
    there = checkpoint.manifest.data
    for what in ("samples", "fingerprint"):
        if getattr(there, what) != getattr(data, what):
            raise DataError(
                f"data: {data.name} has {what} {getattr(data, what)}, checkpoint {checkpoint.path} "
                f"was trained on {what} {getattr(there, what)}; give the run its data back, or "
                "start another run"
            )


def refuse_other_settings(
    checkpoint: Checkpoint, config: Config, loaded: LoadedConfig
) -> list[str]:
    """A line for each setting that has changed and that the user should know of.

    ConfigError for the first changed setting that must not change.
    """
    there, here = flat(checkpoint.manifest.config), flat(config.model_dump(mode="json"))
    free: tuple[str, ...] = FREE
    if config.pruning.method in ONCE:
        free += ("pruning.until_step", "pruning.interval")
    named: tuple[str, ...] = TOLD
    # A setting that is younger than the checkpoint had its default there.
    defaults = flat(Config().model_dump(mode="json"))
    told = []
    for key in here:
        old, new = there.get(key, defaults.get(key)), here[key]
        if key in START and old is not None and new is not None:
            named += (key,)
        if old == new or (key.startswith(free) and key not in named):
            continue
        if not key.startswith(named):
            raise ConfigError(
                f"{loaded.where(key)}: {_short(new)}, but checkpoint {checkpoint.path} was saved "
                f"with {_short(old)}; set it back, or start another run"
            )
        told.append(f"{key} is now {_short(new)}, before it was {_short(old)}")
    return told


def flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of all sections by dotted key, such as `train.steps`."""
    return {
        f"{section}.{key}" if isinstance(values, Mapping) else section: value
        for section, values in settings.items()
        for key, value in (values.items() if isinstance(values, Mapping) else [("", values)])
    }


def _shape(shape: tuple[int, ...] | None) -> str:
    return "nothing" if shape is None else str(shape)


def _short(value: object) -> str:
    text = "".join(letter if letter.isprintable() else "?" for letter in repr(value))
    return text if len(text) <= 60 else text[:57] + "..."
