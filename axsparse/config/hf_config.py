"""Takes family and sizes of a model from a Hugging Face folder (`model.from`), and writes them.

The config.json of GPT-2 becomes the settings of our GPT, and back. The config.json of any other
model is kept unchanged, as `model.hf`, and read by transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axsparse.config.messages import Setting, shorten, show
from axsparse.config.model_config import Family, GptConfig, HfConfig
from axsparse.config.section import flat
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError
from axsparse.runtime.files.paths import expanded, kind_of

CONFIG_FILE = "config.json"
TEXT_CONFIG = "text_config"
"""The section of a config.json that has the settings of the text model among others."""
BUNDLED = "prune_llama.yaml"
"""The bundled configuration of a model of a folder."""
FROM = "model.from"
HF = "model.hf"
NO_KIND = (
    "has no model_type; name a folder of Hugging Face (model.from, in Python ax.hf(FOLDER)), or "
    "write the settings of a config.json: hf: {model_type: llama, …}"
)


def with_folder(settings: Mapping[str, Setting]) -> Mapping[str, Setting]:
    """The settings, completed from the folder that `model.from` names, if any, and by the sizes in
    `model.hf`.

    Raises ConfigError for a given setting that disagrees with the folder's, MissingInputError if
    the folder cannot be read, DataError if its model is none that transformers knows.
    """
    named, inline = settings.get(FROM), settings.get(HF)
    if named is None or not isinstance(named.value, str):
        if inline is None or not isinstance(inline.value, Mapping) or not inline.value:
            return settings  # pydantic refuses other values
        place = f"{HF} ({inline.origin})"
        if has_others(folder_settings(place, inline.value)):
            raise ConfigError(
                f"{place}: {inline.value['model_type']} has more than a text model, which is read "
                f"from a folder; set {FROM}"
            )
        sizes = hf_sizes(place, inline.value)
        more = {f"model.{name}": Setting(value, inline.origin) for name, value in sizes.items()}
        return {**more, **settings}
    weights = settings.get("model.weights")
    if weights is not None and weights.value is not None:
        raise ConfigError(
            f"model.weights ({weights.origin}): {show(weights.value)}, but {FROM} "
            f"{show(named.value)} has weights as well; leave one of them out"
        )
    try:
        path = Path(expanded(named.value)) / CONFIG_FILE
    except ConfigError:
        return settings  # pydantic refuses other values
    where = f"{FROM}: {named.value!r}"
    reject_adapter(where, path.parent)
    if kind_of(where, path) != "file":
        raise no_folder(FROM, named.value)
    filled = dict(settings)
    name = settings.get("model.name")
    for key, value in model_settings(path, None if name is None else name.value).items():
        key = f"model.{key}"
        given = settings.get(key)
        if given is None or given.value is None:
            filled[key] = Setting(value, str(path))
        elif key == HF and isinstance(given.value, Mapping):
            reject_other_settings(path, value, given.value, f"{HF} ({given.origin})")
            filled[key] = Setting(value, str(path))
        elif given.value != value:
            shorter = "; for shorter samples set data.sequence_length"
            more_said = shorter if key == "model.sequence_length" else ""
            raise ConfigError(
                f"{key} ({given.origin}): {show(given.value)}, but {path} has {shown(value)}; "
                f"leave it out, or name another folder{more_said}"
            )
    return filled


def reject_adapter(where: str, folder: Path) -> None:
    """ConfigError for a folder of an adapter, which nothing here adds to the weights; the errors of
    `kind_of`, which begin with `where`."""
    adapter = folder / "adapter_config.json"
    if kind_of(where, adapter) == "file":
        way = ", or remove it" if kind_of(where, folder / CONFIG_FILE) == "file" else ""
        raise ConfigError(
            f"{adapter}: is of an adapter, which transformers adds to the weights and axsparse "
            f"would leave out; save what merge_and_unload of peft returns{way}"
        )


def no_folder(where: str, given: str) -> MissingInputError:
    """The error about a folder of a model that is none; models of the hub are to be fetched."""
    suggestion = f"name a Hugging Face folder of {CONFIG_FILE} and safetensors"
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", given) and not Path(given).exists():
        name = given.partition("/")[2]
        suggestion += f"; a model of the hub is fetched by hf download {given} --local-dir {name}"
    return MissingInputError(f"{where}: {given!r} has no {CONFIG_FILE}; {suggestion}")


def model_settings(path: Path, name: object = None) -> dict[str, Any]:
    """The settings in a config.json, `name` first; DataError if they are of no model.

    A GPT-2 is a `gpt`, unless `name` asks for transformers' own.
    """
    theirs = read_json(path)
    if theirs.get("model_type") == "gpt2" and name != "hf":
        return {"name": "gpt", **from_gpt2(path, theirs)}
    return {"name": "hf", "hf": theirs, **hf_sizes(path, theirs)}


def reject_other_sizes(path: Path, theirs: Mapping[str, Any], model: Family) -> None:
    """ConfigError if a config.json, as `model_settings` returns it, is not of these settings."""
    own, there = flat(model.model_dump()), flat(theirs)
    odd = {name: value for name, value in there.items() if own.get(name) != value}
    if odd:
        raise ConfigError(
            f"{path}: the checkpoint is not of "
            f"{', '.join(f'model.{name} {shown(own.get(name))}' for name in odd)}; set "
            f"{', '.join(f'model.{name} to {shown(value)}' for name, value in odd.items())}"
        )


def read_json(path: Path, remedy: str = "get it anew") -> dict[str, Any]:
    """The settings in a file; DataError, which suggests `remedy`, if it cannot be read or holds
    something else."""
    try:
        settings: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as reason:
        raise DataError(
            f"{path}: cannot be read as JSON ({type(reason).__name__}); {remedy}"
        ) from reason
    if not isinstance(settings, dict):
        raise DataError(f"{path}: is {type(settings).__name__}, not settings; {remedy}")
    return settings


def shown(value: object) -> str:
    """A value as it is written in JSON and in YAML, in at most 60 characters."""
    return shorten(json.dumps(value))


# --- GPT-2 -----------------------------------------------------------------------------

LAYER_NORM_EPSILON = 1e-5
"""The epsilon of our GPT, which is torch's default."""
_GPT2_SIZES = {
    "n_layer": ("num_layers", 12),
    "n_embd": ("hidden_size", 768),
    "n_head": ("num_heads", 12),
    "n_positions": ("sequence_length", 1024),
    "vocab_size": ("vocab_size", 50257),
    "tie_word_embeddings": ("tie_embeddings", True),
}
"""transformers' name of a setting → our name, and the value that it assumes if a file leaves it
out."""
_GPT2_FIXED: Mapping[str, tuple[Any, ...]] = {
    "model_type": ("gpt2",),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "layer_norm_epsilon": (LAYER_NORM_EPSILON,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
"""Settings that our GPT fixes, with the values that fit it; the first is assumed where a file
leaves the setting out."""


def from_gpt2(path: Path, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of our GPT, by name; DataError for models that it cannot represent.

    Dropout is none of them, since it is a matter of training (`unused_dropout` finds it).
    """
    width = theirs.get("n_embd", _GPT2_SIZES["n_embd"][1])
    inner = (None, 4 * width if isinstance(width, int) else None)
    for key, values in {**_GPT2_FIXED, "n_inner": inner}.items():
        has = theirs.get(key, values[0])
        if has not in values:
            raise DataError(
                f"{path}: {key} is {shown(has)}, and the GPT here has "
                f"{' or '.join(map(shown, values))}; take a checkpoint that was trained so"
            )
    return {ours: theirs.get(name, default) for name, (ours, default) in _GPT2_SIZES.items()}


def unused_dropout(model: Family) -> str:
    """The dropout in the folder of a GPT-2, by which transformers would train it; empty if there is
    none."""
    if not isinstance(model, GptConfig) or model.from_ is None:
        return ""
    theirs = read_json(Path(model.from_) / CONFIG_FILE)
    found = {key: theirs.get(key, 0.1) for key in ("embd_pdrop", "resid_pdrop", "attn_pdrop")}
    return ", ".join(f"{key} {rate}" for key, rate in found.items() if rate)


def is_gpt2(path: Path, theirs: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a GPT-2 that our GPT can represent."""
    try:
        return theirs.get("model_type") == "gpt2" and bool(from_gpt2(path, theirs))
    except DataError:
        return False


def to_gpt2(config: GptConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a GPT whose weights are saved in `dtype`."""
    return {
        "architectures": ["GPT2LMHeadModel"],
        **{key: values[0] for key, values in _GPT2_FIXED.items()},
        **{theirs: getattr(config, ours) for theirs, (ours, _) in _GPT2_SIZES.items()},
        "n_inner": None,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "attn_pdrop": 0.0,
        "bos_token_id": None,  # It is not known which tokens begin and end a text.
        "eos_token_id": None,
        "dtype": dtype,
    }


# --- any other model -------------------------------------------------------------------

OLDEST = (5, 20)
"""The oldest version of transformers that models are tried with."""
TORCH_DTYPE = "torch_dtype"
"""The name of `dtype` in older files."""


def config_json(model: Family, dtype: str) -> dict[str, Any]:
    """The config.json of a model whose weights are saved in `dtype`."""
    if isinstance(model, GptConfig):
        return to_gpt2(model, dtype)
    assert isinstance(model, HfConfig), f"transformers has no {model.name}"
    return {**{key: value for key, value in model.hf.items() if key != TORCH_DTYPE}, "dtype": dtype}


QUANTIZED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""The kinds of quantized folders of which transformers makes ones of real numbers, by its class."""
IN_BF16 = (
    "AutoModelForCausalLM.from_pretrained(FOLDER, quantization_config={}(dequantize=True))"
    ".save_pretrained(OTHER, save_original_format=False), of transformers with accelerate"
)
"""The call that does so; in the original format it would keep the names of quantized weights."""
BEFORE = "take the checkpoint before it was quantized, if there is one"
NOT_DONE = {
    "layerdrop": "by which training leaves layers out, and here each is run; set layerdrop to 0.0",
    "output_router_logits": "but routers are not balanced by a loss here; set it to false",
    "use_bidirectional_attention": "and the loss is of next tokens, which such attention sees; "
    "take a checkpoint of a causal model",
}
"""Settings of transformers by which its model is another than the one that is trained here, each
with the reason."""
OF_IMAGES = "vision"
"""The value of `use_bidirectional_attention` by which only tokens of images see later ones."""
HEADLESS = ("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text")
"""Text models of which transformers has no causal language model; the models around them multiply
their hidden states by a head, and that is all."""
DEEPEST = 1000
"""Layers of a model at most, as of our GPT, several times more than any published model has:
transformers takes 10 to 25 ms to make one."""


def has_others(settings: Any) -> bool:
    """Whether a model, of these settings of transformers, has other parts than a language model."""
    return settings.get_text_config() is not settings


def is_headless(text: Any) -> bool:
    """Whether transformers has no causal language model of these settings of a text model, but the
    model around it."""
    return getattr(text, "model_type", None) in HEADLESS


def folder_settings(where: object, theirs: Mapping[str, Any]) -> Any:
    """The settings of a folder as transformers has them; DataError for a model that it does not
    know, or that has no causal language model of real numbers."""
    kind = theirs.get("model_type")
    if not theirs and not isinstance(where, Path):
        raise ConfigError(f"{where}: {NO_KIND}")
    anew = "get it anew" if isinstance(where, Path) else "correct it there"
    configs, causal, images, version = _transformers()
    quantized = theirs.get("quantization_config")
    if quantized is not None:
        kind_of = quantized.get("quant_method") if isinstance(quantized, Mapping) else None
        by = QUANTIZED.get(str(kind_of))
        raise DataError(
            f"{where}: quantization_config is {shown(quantized)}, and weights here are real "
            f"numbers; {f'write one in bf16: {IN_BF16.format(by)}' if by else BEFORE}"
        )
    if other := theirs.get("transformers_weights"):
        raise DataError(
            f"{where}: transformers_weights is {shown(other)}, and weights are read from "
            "model.safetensors; call that file so, and leave transformers_weights out"
        )
    for section in (theirs, *theirs.values()):
        for key, depth in section.items() if isinstance(section, Mapping) else ():
            is_depth = re.search("(?<!_per_)layers?$|^depth$", str(key)) and isinstance(depth, int)
            if is_depth and depth > DEEPEST:
                raise DataError(
                    f"{where}: {key} is {depth}, more than the {DEEPEST:,} that can be built; "
                    f"{anew}"
                )
    if not isinstance(kind, str) or not (kind in causal or kind in images):
        own_code = " (code of a folder is never run)" if "auto_map" in theirs else ""
        newer = "" if isinstance(kind, str) and kind in configs else ", or a newer transformers"
        raise DataError(
            f"{where}: model_type is {shown(kind)}, which is no causal language model of the "
            f"installed transformers {version}{own_code}; take a checkpoint of another model{newer}"
        )
    try:
        # A file has infinities as {"__float__": "Infinity"}, which from_dict leaves as they are.
        settings = configs[kind].from_dict(configs[kind]._decode_special_floats(dict(theirs)))
        text = settings.get_text_config()
    except Exception as reason:
        raise DataError(
            f"{where}: transformers {version} refuses it: {' '.join(str(reason).split())[:200]}; "
            f"{anew}"
        ) from reason
    text_kind = getattr(text, "model_type", text)
    if has_others(settings) and not (kind in images and (text_kind in causal or is_headless(text))):
        way = "take a checkpoint of another model" if kind in images else "leave that part out"
        raise DataError(
            f"{where}: transformers has no causal language model of the text model in {kind} "
            f"({shown(text_kind)}); {way}"
        )
    for key, why in NOT_DONE.items():
        if (value := getattr(text, key, False)) and value != OF_IMAGES:
            raise DataError(f"{where}: {key} is {shown(value)}, {why}")
    return settings


def reject_other_settings(
    path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], where: str
) -> None:
    """ConfigError if some of our settings, at `where`, have other values in a config.json, as
    transformers reads both."""
    there, here = (
        folder_settings(place, settings).get_text_config().to_dict()
        for place, settings in ((path, theirs), (where, ours))
    )
    for key in ours:
        if here.get(key) != there.get(key):
            raise ConfigError(
                f"{where}: {key} {shown(here.get(key))}, but {path} has {shown(there.get(key))}; "
                "leave it out, or name another folder"
            )


def reject_other_heads(path: Path, theirs: Mapping[str, Any]) -> None:
    """ConfigError if a config.json says that the weights next to it have another head than a
    language model's, such as LlamaForSequenceClassification, whose weights nobody would read."""
    architectures, kind = theirs.get("architectures"), theirs.get("model_type")
    for name in architectures if isinstance(architectures, list) else ():
        # Without images it has an encoder, such as Whisper's.
        is_conditional = str(name).endswith("ForConditionalGeneration")
        is_fit = is_conditional and str(kind).removesuffix("_text") in _transformers()[2]
        if not is_fit and re.search("For(?!CausalLM)[A-Z]", str(name)):
            raise ConfigError(
                f"{path}: architectures {shown(name)} has another head than a language model's, "
                "whose weights nobody would read; name the folder of a causal language model"
            )


def hf_sizes(where: object, theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes that a run asks for, of the text model in one that also takes pictures; raises the
    errors of `folder_settings`."""
    settings = folder_settings(where, theirs).get_text_config()
    sizes = {"vocab_size": settings.vocab_size}
    longest = getattr(settings, "max_position_embeddings", None)
    return sizes if longest is None else {"sequence_length": longest, **sizes}


def _transformers() -> tuple[Any, Any, Any, str]:
    """The configurations of transformers and the names of its causal language models and of its
    models of texts and images, by model_type, and its version; MissingInputError where it is
    missing or too old."""
    try:
        import transformers
        from transformers.models.auto import configuration_auto, modeling_auto

        lacks = f"and {transformers.__version__} is installed; install it: pip install -U"
        if tuple(map(int, transformers.__version__.split(".")[:2])) >= OLDEST:
            return (
                configuration_auto.CONFIG_MAPPING,
                modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
                modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
                transformers.__version__,
            )
    except ImportError as reason:
        lacks = f"which is not installed ({reason}); install it: pip install"
    raise MissingInputError(
        f"{HF}: needs transformers {OLDEST[0]}.{OLDEST[1]} or newer, {lacks} 'axsparse[hf]'"
    )
