"""The settings of a model: a section for each family, of which `model.name` chooses one.

To add a family: write its section here and add it to `ModelConfig`, then its layers to
`models/zoo/` and to `model_registry.py` there. Rules between its settings are its `broken_rules`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    field_validator,
    model_serializer,
)
from pydantic_core import PydanticCustomError

from axsparse.config.section import Few, FromList, PathText, Rate, Section, Width, divisors, one_of


class Family(Section):
    """The settings of all language models."""

    name: str
    """A built-in model; custom models come through the Python API."""
    weights: PathText | None = None
    """A safetensors file of initial weights, or a Hugging Face folder of `config.json` and
    safetensors. It names tensors as this model does, or as Hugging Face. null initializes at
    random."""
    from_: PathText | None = Field(default=None, alias="from")
    """A Hugging Face folder of `config.json` and safetensors that the model is: family, sizes and
    weights come from there. Sizes that are given all the same have to agree. null: no folder."""

    new: Annotated[tuple[str, ...], FromList] = ()
    """Names of tensors that begin at random all the same, such as `head.*`: a pretrained body with
    a new head. What the file has in their places is left out; the start of the run names them."""
    sequence_length: Width = 128
    """Longest sequence of the model, in tokens; the sequences of the data are not longer."""
    vocab_size: Width = 256
    """Rows of the token embedding; at least the vocabulary of the data."""

    @model_serializer(mode="wrap")
    def _by_key(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Fields by the keys that files have; `from` is a word of Python."""
        fields: dict[str, Any] = write(self)
        return {name.rstrip("_"): value for name, value in fields.items()}

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if self.new and self.weights is None and self.from_ is None:
            yield (
                "new",
                f"{list(self.new)}, but no weights are loaded, so that all of the model is new; "
                "set model.from or model.weights, or leave it out",
            )


class GptConfig(Family):
    """A decoder like GPT-2 and GPT-3."""

    name: Literal["gpt"] = "gpt"
    """Learned positions, LayerNorm, GELU. `hidden_size` is a multiple of `num_heads`."""
    num_layers: Annotated[int, Field(ge=1, le=1000)] = 6
    """Transformer blocks, embedding and head not counted."""
    hidden_size: Width = 256
    """Width of the residual stream."""
    num_heads: Few = 8
    """Attention heads of each block."""
    tie_embeddings: bool = True
    """Whether the output head uses the token embedding's weights."""
    dropout: Rate = 0.0
    """Fraction of activations dropped, after the embedding and each residual branch."""

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        yield from super().broken_rules()
        if self.hidden_size % self.num_heads:
            yield (
                "num_heads",
                f"{self.num_heads} does not divide model.hidden_size {self.hidden_size}; "
                f"choose {one_of(divisors(self.hidden_size), near=self.num_heads)}",
            )


class HfConfig(Family):
    """A causal language model of Hugging Face's transformers, by its own code."""

    name: Literal["hf"] = "hf"
    """Any model that the installed transformers knows; it is an extra, `axsparse[hf]`."""
    hf: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies it
    """The settings of the model as in its `config.json`, `model_type` among them. With `model.from`
    they come from the folder, and `sequence_length` and `vocab_size` come from them."""

    @field_validator("hf", mode="before")
    @classmethod
    def _as_in_a_file(cls, given: object) -> object:
        try:
            return json.loads(json.dumps(given))
        except (TypeError, ValueError):
            raise PydanticCustomError(
                "hf", "Input should be a dict of texts and numbers, such as CONFIG.to_dict()"
            ) from None


def family_of(given: object) -> str | None:
    """The name of the family of some settings, which are a mapping or a section."""
    if isinstance(given, Mapping):
        name = given.get("name", GptConfig.model_fields["name"].default)
        return name if isinstance(name, str) else None
    return getattr(given, "name", None)


ModelConfig = Annotated[
    Annotated[GptConfig, Tag("gpt")] | Annotated[HfConfig, Tag("hf")],
    Discriminator(
        family_of, custom_error_type="family", custom_error_message="Input should be 'gpt' or 'hf'"
    ),
]
"""The settings of one model, of whichever family."""
FAMILIES: Mapping[str, type[Family]] = {
    section.model_fields["name"].default: section
    for section in (get_args(member)[0] for member in get_args(get_args(ModelConfig)[0]))
}
"""The section of each family, by its name."""
