"""Opens a pruned language model of a folder for use, with its weights as their kept entries, and
continues a text with it by transformers.

Tensors are read one at a time, and each that is pruned is turned into its kept entries before the
next one is read, so that the dense model is never in memory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from axsparse.config.hf_config import CONFIG_FILE, folder_settings, read_json, reject_adapter
from axsparse.data.tokenizers import GENERATION
from axsparse.models.layer import mismatched_values
from axsparse.models.module_buffers import slots
from axsparse.models.stand_ins import tied_names
from axsparse.models.start_weights import open_weights
from axsparse.models.zoo.hf_models import HfFile, full_model
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError, check_kinds, one_line
from axsparse.runtime.files.paths import expanded, kind_of
from axsparse.samo.pruned_weight import (
    FEWEST_ZEROS,
    PrunedWeight,
    finish,
    has_zeros,
    multiplied_weights,
    put,
)


def load_pruned(folder: str | Path, *, fewest_zeros: float | None = FEWEST_ZEROS) -> Any:
    """A causal language model of transformers in bf16 on the CPU, from a folder; of a folder for
    pictures and text the whole model.

    The folder is one of Hugging Face, as `axsparse prune` writes it, or of `axsparse export --to
    sparse`. `fewest_zeros` is the share of zeros from which a weight is replaced; None leaves all
    dense. Weights are replaced as by `accelerate`; the model is in evaluation mode, and its
    `generate`, `forward` and `config` are transformers' own.

    Raises MissingInputError if the folder or transformers is not there, DataError if it is damaged
    or of no causal language model, ConfigError if it has an adapter.
    """
    check_kinds("load_pruned", locals(), fewest_zeros="number or None")
    folder = Path(expanded(folder))
    reject_adapter("load_pruned", folder)
    if kind_of("load_pruned", folder / CONFIG_FILE) != "file":
        raise MissingInputError(
            f"load_pruned: {folder} has no {CONFIG_FILE}; name a folder that axsparse prune, "
            "axsparse export --to sparse or save_pretrained wrote"
        )
    settings = {**read_json(folder / CONFIG_FILE), "dtype": "bfloat16"}
    opened, causal = open_weights(folder), full_model(settings)
    file = HfFile(opened, causal)
    places = {name: (module, turned) for module, name, _, turned in multiplied_weights(causal)}
    exact = [one.replace("*", ".*") for one in causal._keep_in_fp32_modules_strict or ()]

    def typed(name: str, made: Tensor, tensor: Tensor) -> Tensor:
        """A tensor in the type that transformers gives it."""
        is_exact = any(re.search(each, name) for each in exact)
        return tensor.to(torch.float32 if is_exact else made.dtype)

    replaced, others = 0, dict(tied_names(causal))
    for name, parameter in causal.named_parameters():
        there = name if name in file.shapes else others.get(name, name)
        if there not in file.shapes:
            continue
        value = typed(name, parameter, _checked(file, there, parameter))
        owner = causal.get_submodule(name.rpartition(".")[0])
        if name in places and fewest_zeros is not None and has_zeros(value, fewest_zeros):
            pruned = PrunedWeight.of(value, is_transposed=places[name][1])
            put(owner, name.rpartition(".")[2], nn.Parameter(pruned, requires_grad=False))
            replaced += 1
        else:
            made = nn.Parameter(value, requires_grad=False)
            owner._parameters[name.rpartition(".")[2]] = made
    for slot in slots(causal):
        if slot.persists and slot.name in file.shapes:
            slot.put(typed(slot.name, slot.tensor, _checked(file, slot.name, slot.tensor)))
    causal.tie_weights()
    missing = [name for name, one in causal.named_parameters() if one.is_meta]
    missing += [slot.name for slot in slots(causal) if slot.tensor.is_meta]
    if missing:
        what = f"lacks {missing[0]!r}, which {CONFIG_FILE} asks for"
        raise DataError(f"{opened.path}: {what}; get all of its files anew")
    if (folder / GENERATION).is_file():
        causal.generation_config = _generation_settings(folder, type(causal.generation_config))
    if fewest_zeros is not None:
        finish(causal, replaced)
    return causal.eval()


def _generation_settings(folder: Path, kind: Any) -> Any:
    """The folder's generation_config.json; DataError if it is damaged."""
    try:
        return kind.from_pretrained(str(folder))
    except (OSError, ValueError, TypeError) as reason:
        raise DataError(
            f"{folder / GENERATION}: is damaged ({one_line(reason)[:200]}); get it anew"
        ) from reason


def _checked(file: HfFile, name: str, wanted: Tensor) -> Tensor:
    """A tensor of the file; DataError if it has another shape or kind of numbers than the model, or
    NaN, or is a parameter with infinities."""
    if file.shapes[name] != tuple(wanted.shape):
        raise DataError(
            f"{file.path}: {name!r} is {file.shapes[name]}, and {CONFIG_FILE} asks for "
            f"{tuple(wanted.shape)}; get both of one model"
        )
    tensor = file.read(name)
    is_parameter = isinstance(wanted, nn.Parameter)
    if wanted.is_floating_point():
        odd = mismatched_values(tensor, trained=is_parameter)
        if not (odd or is_parameter) and tensor.float().isnan().any():  # bounds may be infinite
            odd = "not finite: it has NaN"
    else:
        kinds = (str(one.dtype).removeprefix("torch.") for one in (tensor, wanted))
        odd = "" if torch.can_cast(tensor.dtype, wanted.dtype) else ", not ".join(kinds)
    if odd:
        raise DataError(f"{file.path}: {name!r} is {odd}; get it anew")
    return tensor


COPY = (
    "copy tokenizer.json and tokenizer_config.json there, of a run into the folder that axsparse "
    "export --to hf makes"
)


def tokenizer_of(folder: Path, named: object, way: str = COPY) -> Any:
    """transformers' tokenizer of a folder; MissingInputError, from `named` to `way`, if there is
    none, and if there is no transformers, DataError if it is damaged."""
    folder_settings(folder / CONFIG_FILE, read_json(folder / CONFIG_FILE))
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    try:
        tokenizer = load(str(folder), local_files_only=True, trust_remote_code=False)
        if tokenizer.vocab_size:
            return tokenizer
        said = "it would have no vocabulary"
    except (OSError, ValueError, KeyError, ImportError) as reason:
        said = " ".join(str(reason).split())[:200]
    except Exception as reason:  # the library of Rust has no class for its errors
        raise DataError(
            f"{named}: transformers cannot read its tokenizer ({one_line(reason)[:200]}); get its "
            "files anew, or install a newer tokenizers"
        ) from reason
    raise MissingInputError(f"{named}: transformers finds no tokenizer ({said}); {way}")


CONTEXT = 16
"""Tokens of a prompt before the first new ones when these are decoded."""


@dataclass(frozen=True)
class Continuation:
    """How a text was continued."""

    tokens: int
    tokens_per_second: float
    """Of those after the first, which takes the prompt."""
    weight_bytes: int
    dense_bytes: int
    """Bytes of the same weights in bf16, dense."""
    fills_room: bool
    """Whether the model has room for no more tokens."""


# Reason: a model, a text, and how tokens are chosen.
def continued(
    model: Any,
    tokenizer: Any,
    prompt: str,
    tokens: int,
    *,
    temperature: float | None,
    top_k: int | None,
    seed: int,
    show: Callable[[str], object],
) -> Continuation:
    """Generate at most `tokens` tokens, and `show` the text as it grows, the prompt first.

    The likeliest token follows where `temperature` is None. ConfigError for a prompt that the model
    has no room for, DataError for a generation_config.json that asks for what is not there.
    """
    from transformers.generation.streamers import TextStreamer

    times: list[float] = []

    class Streamer(TextStreamer):
        def put(self, value: Any) -> None:
            times.append(time.perf_counter())
            add: Any = super().put
            add(value)
            # The end of the prompt or of a line precedes the rest: decoders strip a first space.
            if not self.token_cache:
                self.token_cache = value.view(-1)[-CONTEXT:].tolist()
                shown: Any = tokenizer.decode(self.token_cache, skip_special_tokens=True)
                self.print_len = len(shown)

        def on_finalized_text(self, text: str, *_: object, **__: object) -> None:
            show(text)

    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].long()
    if ids.numel() == 0:
        ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, 0)
        ids = torch.tensor([[next(end for end in ends if end is not None)]])
    rows = model.get_input_embeddings().weight.shape[0]
    if int(ids.max()) >= rows:
        raise ConfigError(
            f"--prompt: has token {int(ids.max())}, and the model an embedding of {rows}; take "
            "the tokenizer of the model"
        )
    room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if room is not None and ids.shape[1] >= room:
        raise ConfigError(
            f"--prompt: has {ids.shape[1]} tokens, and the model has room for {room - 1} and one "
            "that follows; shorten it"
        )
    tokens = tokens if room is None else min(tokens, room - ids.shape[1])
    show(prompt)
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"do_sample": temperature is not None, "num_beams": 1}
    settings |= {"return_dict_in_generate": False, "penalty_alpha": None, "dola_layers": None}
    if temperature is not None:
        settings |= {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0}
    try:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            streamer=Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id or 0,
            tokenizer=tokenizer,
            **settings,
        )
    except ValueError as reason:
        raise DataError(
            f"{GENERATION}: transformers refuses its settings ({one_line(reason)[:200]}); "
            "leave them out"
        ) from reason
    made = out.shape[1] - ids.shape[1]
    seconds = times[-1] - times[1] if len(times) > 2 else 0.0
    weights = list(model.parameters())
    return Continuation(
        made,
        (len(times) - 2) / seconds if seconds else 0.0,
        sum(
            one.compressed_bytes if isinstance(one, PrunedWeight) else one.nbytes for one in weights
        ),
        sum(2 * one.numel() for one in weights),
        fills_room=out.shape[1] == room,
    )
