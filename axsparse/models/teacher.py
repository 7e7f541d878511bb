"""The teacher of a training: a frozen language model whose logits the trained one is to match.

Every stage runs some layers of the teacher next to its own, and the activations of both travel
together (docs/decisions/038-distillation.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor, nn

from axsparse.config.hf_config import (
    CONFIG_FILE,
    is_gpt2,
    model_settings,
    no_folder,
    read_json,
)
from axsparse.config.model_config import FAMILIES
from axsparse.config.schema import Config, sample_length
from axsparse.models.layer import Layer, Model
from axsparse.models.losses import distillation, linear_cross_entropy, summed_cross_entropy
from axsparse.models.sequential import given_module
from axsparse.models.zoo.model_registry import model_without_weights, named_model
from axsparse.runtime.errors import ConfigError, check_kind
from axsparse.runtime.files.paths import kind_of


@dataclass(frozen=True)
class Teacher:
    """A teacher, and how much it counts in the loss of a model."""

    model: Model
    """The teacher as a model of its own; it starts at its weights."""
    share: float
    """The weight of the divergence from the teacher's logits, up to 1."""
    temperature: float

    def layers(self, numbers: Sequence[int]) -> list[Layer]:
        """Layers of the teacher by their numbers, of which nothing is trained."""
        layers = (self.model.layers[number] for number in numbers)
        return [replace(layer, build=partial(_frozen, layer)) for layer in layers]

    def distilled(
        self, outputs: Sequence[Tensor], taught: Sequence[Tensor], targets: Tensor | None
    ) -> Tensor:
        """The summed loss of a microbatch, from what the last layers of the trained model and of
        the teacher return (`losses.distillation`)."""
        assert targets is not None, "a language model has targets"
        return distillation(
            outputs, taught, targets, share=self.share, temperature=self.temperature
        )


def _frozen(layer: Layer) -> nn.Module:
    return layer.build().requires_grad_(requires_grad=False)


def _vocabulary(model: Model) -> int | None:
    """The size of the model's vocabulary; also of one whose embedding, of a class of the user, may
    map larger ids into it, so that its inputs are not bounded."""
    if model.vocab_size is None and model.layers:
        return getattr(given_module(model.layers[0]), "num_embeddings", None)
    return model.vocab_size


def with_teacher(model: Model, config: Config, *, reads_weights: bool = True) -> Model:
    """The model with the teacher that `train.teacher` names; the same model if none is named.

    Without `reads_weights` the teacher begins at random, for plans. Raises ConfigError for a model
    with another loss than a cross entropy and for a teacher of another vocabulary or of shorter
    sequences, MissingInputError and DataError for a folder that holds no model.
    """
    check_kind("model: teacher", model.teacher, Teacher | None, "set train.teacher to its folder")
    folder, where = config.train.teacher, config.where("train.teacher")
    if folder is None:
        return model
    if model.loss not in (linear_cross_entropy, summed_cross_entropy):
        raise ConfigError(
            f"{where}: model {model.name} has a loss of its own, and a teacher is for the cross "
            "entropy of a language model; leave it out, or make a loss of both yourself"
        )
    path, length = Path(folder) / CONFIG_FILE, sample_length(config)
    if kind_of(f"{where}: {folder!r}", path) != "file":
        raise no_folder(where, folder)
    name = None if is_gpt2(path, read_json(path)) else "hf"
    found = {"sequence_length": length, **model_settings(path, name), "from": folder}
    settings = FAMILIES[found["name"]].model_validate(found)
    words = _vocabulary(model)
    if settings.vocab_size != words:
        raise ConfigError(
            f"{where}: {folder!r} has a vocabulary of {settings.vocab_size}, and the model one of "
            f"{words}; take a teacher of the same tokenizer, whose embedding has as "
            f"many rows (transformers' resize_token_embeddings({words}) changes padding)"
        )
    if settings.sequence_length < length:
        raise ConfigError(
            f"{where}: {folder!r} reads {settings.sequence_length} tokens at most, and samples "
            f"have {length}; set data.sequence_length to {settings.sequence_length}, or take "
            "another teacher"
        )
    of_teacher = config.with_values({"model": settings, "data.sequence_length": length})
    make = named_model if reads_weights else model_without_weights
    train = config.train
    return replace(
        model,
        teacher=Teacher(
            make(of_teacher), train.distillation_weight, train.distillation_temperature
        ),
    )
