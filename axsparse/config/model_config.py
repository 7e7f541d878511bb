"""The settings of a model: a section for each family, of which `model.name` chooses one.

To add a family: write its section here and add it to `ModelConfig`, then its layers to
`models/zoo/` and to `model_registry.py` there. Rules between its settings are its validators.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from axsparse.config.section import (
    BrokenRule,
    Count,
    Few,
    FromList,
    Rate,
    Section,
    Width,
    divisors,
    one_of,
)

Positive = Annotated[float, Field(gt=0.0)]


class Family(Section):
    """What the settings of all families have."""

    name: str
    """A built-in model; models of your own come through the Python API."""
    weights: str | None = None
    """A file of initial weights, safetensors or torch, or a Hugging Face folder of `config.json`
    and safetensors. It names tensors as this model does, or as torchvision (vgg19,
    wide_resnet101_2) or Hugging Face (gpt, llama). null initializes at random."""
    from_: str | None = Field(default=None, alias="from")
    """A Hugging Face folder of `config.json` and safetensors that the model is: family, sizes and
    weights come from there. Sizes that are given all the same have to agree. null: no folder."""

    new: Annotated[tuple[str, ...], FromList] = ()
    """Names of tensors that begin at random all the same, such as `head.*`: a pretrained body with
    a new head. What the file has in their places is left out; the start of the run names them."""

    @model_serializer(mode="wrap")
    def _by_key(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Fields by the keys that files have; `from` is a word of Python."""
        fields: dict[str, Any] = write(self)
        return {name.rstrip("_"): value for name, value in fields.items()}

    @model_validator(mode="after")
    def _has_weights_beside_new_ones(self) -> Family:
        if self.new and self.weights is None and self.from_ is None:
            raise BrokenRule(
                "new",
                f"{list(self.new)}, but no weights are loaded, so that all of the model is new; "
                "set model.from or model.weights, or leave it out",
            )
        return self


class TextFamily(Family):
    """What the settings of all language models have."""

    num_layers: Annotated[int, Field(ge=1, le=1000)] = 6
    """Transformer blocks, embedding and head not counted."""
    hidden_size: Width = 256
    """Width of the residual stream."""
    num_heads: Few = 8
    """Attention heads of each block."""
    sequence_length: Width = 128
    """Longest sequence, in tokens, that the model is for; those of the data are at most so long."""
    vocab_size: Width = 256
    """Rows of the token embedding; at least the vocabulary of the data."""
    tie_embeddings: bool = True
    """Whether the output head uses the token embedding's weights."""

    @model_validator(mode="after")
    def _splits_its_width_among_heads(self) -> TextFamily:
        if self.hidden_size % self.num_heads and getattr(self, "head_dim", None) is None:
            raise BrokenRule(
                "num_heads",
                f"{self.num_heads} does not divide model.hidden_size {self.hidden_size}; "
                f"choose {one_of(divisors(self.hidden_size), near=self.num_heads)}",
            )
        return self


class GptConfig(TextFamily):
    """A decoder like GPT-2 and GPT-3."""

    name: Literal["gpt"] = "gpt"
    """Learned positions, LayerNorm, GELU. `hidden_size` is a multiple of `num_heads`."""
    dropout: Rate = 0.0
    """Fraction of activations dropped, after the embedding and each residual branch."""


class LlamaConfig(TextFamily):
    """A decoder like Llama, Mistral and Qwen."""

    name: Literal["llama"] = "llama"
    """Rotary positions, RMSNorm, SwiGLU: Llama, Mistral, Qwen2, Qwen3, SmolLM, TinyLlama."""
    intermediate_size: Width = 688
    """Width between the matrices of each block's SwiGLU."""
    num_key_value_heads: Few | None = None
    """Heads of keys and values, a divisor of `num_heads`; each serves as many heads of queries.
    null: as many as `num_heads`."""
    head_dim: Few | None = None
    """Width of a head, an even number; null: `hidden_size` / `num_heads`."""
    norm_eps: Positive = 1e-5
    """Added to the mean square in every RMSNorm."""
    rope_theta: Positive = 10_000.0
    """Base of the rotary embedding's wavelengths."""
    rope_factor: Annotated[float, Field(ge=1.0)] = 1.0
    """Scaling of Llama 3: long wavelengths are multiplied by this; 1 scales nothing."""
    rope_low_factor: Positive = 1.0
    """Scaling of Llama 3: wavelengths above `rope_original_length` / this count as long."""
    rope_high_factor: Positive = 4.0
    """Scaling of Llama 3: wavelengths below `rope_original_length` / this stay; those in between
    pass smoothly from one rule to the other."""
    rope_original_length: Count = 8192
    """Scaling of Llama 3: longest sequence, in tokens, before the scaling."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias, as in Qwen2."""
    qk_norm: bool = False
    """Whether each head's queries and keys pass an RMSNorm, as in Qwen3."""

    @model_validator(mode="after")
    def _heads_and_wavelengths_fit(self) -> LlamaConfig:
        shared, width = self.num_key_value_heads, head_width(self)
        if shared is not None and self.num_heads % shared:
            raise BrokenRule(
                "num_key_value_heads",
                f"{shared} does not divide model.num_heads {self.num_heads}; "
                f"choose {one_of(divisors(self.num_heads), near=shared)}",
            )
        if width % 2:
            raise BrokenRule(
                "head_dim",
                f"rotary embeddings turn pairs, and {width} is odd; choose an even number",
            )
        if self.rope_low_factor >= self.rope_high_factor:
            raise BrokenRule(
                "rope_low_factor",
                f"{self.rope_low_factor:g} is not below model.rope_high_factor "
                f"{self.rope_high_factor:g}, so that no wavelength would lie between long and "
                f"short; choose less than {self.rope_high_factor:g}",
            )
        return self


def key_value_heads(config: LlamaConfig) -> int:
    """Heads of keys and values."""
    return config.num_key_value_heads or config.num_heads


def head_width(config: LlamaConfig) -> int:
    """Width of a head."""
    return config.head_dim or config.hidden_size // config.num_heads


class ImageFamily(Family):
    """What the settings of all image classifiers have."""

    num_classes: Width = 1000
    """Classes of images."""


class Vgg19Config(ImageFamily):
    """VGG-19."""

    name: Literal["vgg19"] = "vgg19"
    """19 layers of 3×3 convolutions and wide linear layers."""
    dropout: Rate = 0.0
    """Fraction of activations dropped after each hidden linear layer (the paper has 0.5)."""


class WideResnetConfig(ImageFamily):
    """WideResNet-101-2."""

    name: Literal["wide_resnet101_2"] = "wide_resnet101_2"
    """101 layers with residual connections, twice as wide as ResNet-101."""


class CnnConfig(ImageFamily):
    """A small convolutional network."""

    name: Literal["cnn"] = "cnn"
    """Four convolutions, for images of a few pixels."""
    channels: Few = 3
    """Channels of an image, 1 for grey and 3 for colour."""


def family_of(given: object) -> str | None:
    """The name of the family of some settings, which are a mapping or a section."""
    if isinstance(given, Mapping):
        name = given.get("name", GptConfig.model_fields["name"].default)
        return name if isinstance(name, str) else None
    return getattr(given, "name", None)


ModelConfig = Annotated[
    Annotated[GptConfig, Tag("gpt")]
    | Annotated[LlamaConfig, Tag("llama")]
    | Annotated[Vgg19Config, Tag("vgg19")]
    | Annotated[WideResnetConfig, Tag("wide_resnet101_2")]
    | Annotated[CnnConfig, Tag("cnn")],
    Discriminator(
        family_of,
        custom_error_type="family",
        custom_error_message=(
            "Input should be 'gpt', 'llama', 'vgg19', 'wide_resnet101_2' or 'cnn'"
        ),
    ),
]
"""The settings of one model, of whichever family."""
FAMILIES: Mapping[str, type[Family]] = {
    section.model_fields["name"].default: section
    for section in (get_args(member)[0] for member in get_args(get_args(ModelConfig)[0]))
}
"""The section of each family, by its name."""
F = TypeVar("F", bound=Family)


def of_family(model: Family, family: type[F]) -> F:
    """The settings, which have to be of this family."""
    assert isinstance(model, family), f"{model.name} is no {family.__name__}"
    return model
