"""Exports the weights of a checkpoint, one tensor at a time, in forms that other libraries read.

    hf      a folder of model.safetensors, with transformers' names, and config.json
    sparse  the same folder with sparse.safetensors: kept entries in bf16 and one bit an entry
    torch   a safetensors file of dense tensors by global name

`from_pretrained` loads the folder of `hf`, `load_pruned` the other one. Both have the files of
a tokenizer: copies of the files next to the weights of `model.from`, or else files made from the
tokenizer of the data. `axsparse.models.zoo.gpt` knows the names and shapes of GPT-2; a model
of transformers has its own.

Pruned entries are zero in dense tensors. A tied weight is written once, under the name of its
first use, or under those that the folder of `model.from` has. Buffers are written after the
parameters of their layer.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import torch
from pydantic import ValidationError
from torch import Tensor

from axsparse.config.hf_config import (
    CONFIG_FILE,
    TEXT_CONFIG,
    TORCH_DTYPE,
    config_json,
    folder_settings,
    model_settings,
    read_json,
    reject_adapter,
    reject_other_sizes,
)
from axsparse.config.load import data_elsewhere
from axsparse.config.model_config import Family, GptConfig, HfConfig
from axsparse.config.schema import Config
from axsparse.config.section import flat
from axsparse.data.tokenizers import (
    EOS,
    GENERATION,
    JINJA,
    SETTINGS,
    ExportedTokenizer,
    exported_tokenizer,
    with_ends,
)
from axsparse.models.layer import Model
from axsparse.models.model_profile import ModelProfile, profile
from axsparse.models.module_buffers import with_other_names
from axsparse.models.stand_ins import tied_names
from axsparse.models.start_weights import INDEX_FILE, WHOLE_FILE, open_weights
from axsparse.models.zoo.gpt import gpt2_name, turned
from axsparse.models.zoo.hf_models import HfFile, PublishedNames, empty_model, surrounding
from axsparse.models.zoo.model_registry import model_without_weights
from axsparse.runtime.errors import (
    ConfigError,
    DataError,
    MissingInputError,
    OutputError,
    check_kinds,
    writing,
)
from axsparse.runtime.files.atomic import new_path, sync_folder, write_new
from axsparse.runtime.files.paths import expanded, is_own, reject_within
from axsparse.runtime.files.safetensors import (
    SPARSE_FILE,
    SUFFIX,
    VERSION,
    VERSION_KEY,
    SafetensorsFile,
    TensorHeader,
    header_of,
    is_sparse,
    sparse_tensors,
    write_safetensors,
)
from axsparse.samo.precision import DTYPES
from axsparse.training.checkpoint.checkpoint_folder import CHECKPOINTS, DataEntry, ParameterEntry
from axsparse.training.checkpoint.layer_files import BUFFER, MASTER, VALUE, CheckpointFiles
from axsparse.training.checkpoint.verification import Checkpoint, checkpoint_of, verify

T = TypeVar("T")
Form = Literal["hf", "sparse", "torch"]
WEIGHTS = re.compile(
    r"\.(safetensors|pt|pth|ckpt|gguf|h5|msgpack|distcp|keras|nemo|onnx|onnx_data|ot|tflite)$|\.index\.json$"
    r"|^(?!.*(vocab|tokenizer|merges|bpe|spm)).*\.(bin|npz)$"
)
"""Finds the names of files of weights, in whatever format, but for vocabularies: next to exported
weights, earlier ones would be taken for them."""
MODULES = "modules.json"
"""Names the folders of the modules that sentence-transformers runs behind the model."""
CARD = "README.md"
Value = Callable[[], Tensor]
Tensors = Mapping[str, tuple[TensorHeader, Value]]
Files = Mapping[str, bytes | Path | Callable[[], str]]
"""By their paths in a folder, the contents of files, the files to copy, or what gives the text of a
page once the weights are written."""
_STEP = "step"
"""Names the steps done, in the metadata of all that is exported."""
_MARK = f'{{"format": "pt", "{_STEP}": '
_FILES = "files"
"""Names the other files of a folder, in the metadata of its weights: a list in JSON."""
FILE_BYTES = 50 * 10**9
"""The most bytes of tensors in a file of a folder, as transformers has it: hubs take no larger
files."""


@dataclass(frozen=True)
class ExportSummary:
    """A summary of an export."""

    checkpoint: Checkpoint
    tensors: int
    nbytes: int
    notes: Sequence[str] = ()


# Reason: these are the arguments of the Python API, all but the first three optional.
def export(
    run: str | Path,
    form: Form,
    path: str | Path,
    *,
    step: int | Literal["best"] | None = None,
    trained: bool = False,
    force: bool = False,
    dtype: Callable[[str], torch.dtype] | None = None,
    card: str | None = None,
    data: Sequence[str] = (),
) -> ExportSummary:
    """Verify a checkpoint and write its weights to `path`, complete or not at all.

    `run` and `step` name the checkpoint as in `load`. The values are the fp32 masters, or with
    `trained` the weights in the training precision; `dtype(name)` may give another type for each
    parameter, by global name. `force` replaces the files of an earlier export; the model's card in
    `model.from` follows the text `card`, or a line of our own; `data` says where moved data, which
    have the tokenizer, are, such as "data.path=PATH". One process does this, while the run may
    continue.

    Raises ConfigError if the form does not suit the model or the path, OutputError if the path
    is taken or cannot be written, DataError or MissingInputError if the checkpoint is damaged or
    is removed meanwhile, and MissingInputError if weights of `model.from` that go out are gone.
    """
    check_kinds("export", locals(), dtype="function or None", card="text or None")
    checkpoint, path = checkpoint_of(Path(expanded(run)), step), Path(expanded(path))
    if form not in get_args(Form):
        raise ConfigError(f"export: {form!r} is no form; choose one of {', '.join(get_args(Form))}")
    is_folder = form != "torch"
    if data and not is_folder:
        raise ConfigError(
            "export: data (--set) has the tokenizer of a folder, and torch is a file; leave it out"
        )
    if not is_folder and path.suffix != SUFFIX:
        raise ConfigError(f"{str(path)!r} does not end in {SUFFIX}; add that")
    path, saved = path.absolute(), checkpoint.path.resolve().parent
    reject_within(path, saved if saved.name == CHECKPOINTS else checkpoint.path, "the checkpoint")
    _reject_in_model(path, flat(checkpoint.manifest.config).get("model.from"))
    _reject_taken(path, is_folder=is_folder, force=force)
    weights = Weights(checkpoint, trained=trained)
    tensors: Tensors = weights.with_other_names(weights.by_name(dtype))
    files: dict[str, bytes | Path] | None = None
    notes: Sequence[str] = ()
    if is_folder:
        config = weights.config()
        configured_model(config, weights.shapes(), checkpoint.path)
        known = weights.by_name(dtype)
        tensors = _published(config.model, known)
        usual = _usual(known[name][0].dtype for name in weights.parameters)
        usual = torch.bfloat16 if form == "sparse" else usual
        files, notes = _files(data_elsewhere(config, data), usual, checkpoint.manifest.data)
        given = _card(config.model, path, checkpoint.step)
        files |= given if card is None else {CARD: card.encode(errors="replace")}
        if form == "sparse":
            tensors = sparse_tensors(tensors)
    nbytes = _write(path, tensors, files, checkpoint.step, force=force)
    return ExportSummary(checkpoint, len(tensors), nbytes, notes)


def export_sparse(folder: Path, path: Path, *, force: bool) -> tuple[int, int]:
    """Write a Hugging Face folder of a pruned model in the form `sparse`; returns the number of its
    tensors and their bytes.

    The other files are copies. Raises what `export` raises, ConfigError if `path` is in the
    folder, or that has an adapter, and DataError for no causal language model of real numbers.
    """
    path = path.absolute()
    reject_within(path, folder, "the model")
    _reject_taken(path, is_folder=True, force=force)
    reject_adapter(f"{folder}", folder)
    settings = read_json(folder / CONFIG_FILE)
    folder_settings(folder / CONFIG_FILE, settings)
    opened = open_weights(folder)
    whole = {
        name: (TensorHeader(opened.dtype(name), shape), partial(opened.read, name))
        for name, shape in opened.shapes.items()
    }
    files = _companions(folder)
    files[CONFIG_FILE] = _json({**settings, "dtype": "bfloat16"})
    tensors = sparse_tensors(whole)
    return len(tensors), _write(path, tensors, files, 0, force=force)


# Reason: the tensors, their description, and the path.
def save_folder(
    config: Config,
    shapes: Mapping[str, tuple[int, ...]],
    weights: Mapping[str, Tensor],
    data: DataEntry,
    path: Path,
    *,
    step: int,
    force: bool,
) -> Sequence[str]:
    """Write a Hugging Face folder of weights in memory; returns remarks for the user.

    `shapes` has the parameters' shapes, the other weights are buffers; `data` is the entry of the
    training data. Raises the errors of `export`.
    """
    path = path.absolute()
    _reject_in_model(path, config.model.from_)
    _reject_taken(path, is_folder=True, force=force)
    held = {name: (header_of(one), one.detach) for name, one in weights.items()}
    configured_model(config, shapes, "save_hf")
    tensors = _published(config.model, held)
    dtype = next(weights[name].dtype for name in shapes)
    files, notes = _files(config, dtype, data)
    files |= _card(config.model, path, step)
    _write(path, tensors, files, step, force=force)
    return notes


# Reason: the model, its values, their types, and the path.
def export_folder(
    config: Config,
    profiled: ModelProfile,
    read: Callable[[str, str], Tensor | None],
    path: Path,
    dtype: Callable[[str], torch.dtype],
    named: Callable[[str], torch.dtype],
    card: Callable[[], str] | None = None,
    *,
    force: bool = False,
) -> int:
    """Write a Hugging Face folder of a model that starts from one, and return its bytes.

    `read(layer, name)` gives the value of a parameter or buffer by its global name, or None for a
    buffer that no file has; `dtype(name)` is the type in which a parameter is written, and
    `named(name)` that by which config.json names the type of most. `card()` gives the text of the
    model's card once the weights are written; `force` replaces an earlier folder. The other files
    of the folder are copies. Raises what `export` raises.
    """

    def value(layer: str, name: str, dtype: torch.dtype) -> Tensor:
        found = read(layer, name)
        assert found is not None, f"{name} has no value"
        return found.to(dtype)

    known: dict[str, tuple[TensorHeader, Value]] = {}
    for layer in profiled.layers:
        for each in layer.parameters:
            if each.name not in profiled.ties:
                header = TensorHeader(dtype(each.name), tuple(each.shape))
                known[each.name] = header, partial(value, layer.name, each.name, header.dtype)
        for buffer in (each for each in layer.buffers if each.persists):
            tensor = read(layer.name, buffer.name)
            if tensor is not None:
                known[buffer.name] = header_of(tensor), tensor.detach
    usual = _usual(named(name) for name in profiled.shapes if name in known)
    copies, _ = hf_files(config.model, usual, None)
    files: Files = copies if card is None else {**copies, CARD: card}
    return _write(path.absolute(), _published(config.model, known), files, 0, force=force)


def _write(path: Path, tensors: Tensors, files: Files | None, step: int, *, force: bool) -> int:
    """Write tensors to `path`, into a folder if there are other files; returns their bytes."""
    headers = {name: header for name, (header, _) in tensors.items()}
    nbytes = sum(header.nbytes for header in headers.values())
    is_folder = files is not None
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _writing(path), new_path(path) as unfinished:
        file = unfinished
        if is_folder:
            unfinished.mkdir()
            file = unfinished / (SPARSE_FILE if is_sparse(headers) else WHOLE_FILE)
        others, version = sorted(files or ()), {}
        parts: dict[Path, Mapping[str, TensorHeader]] = {file: headers}
        if file.name == SPARSE_FILE:
            version = {VERSION_KEY: VERSION}
        elif is_folder:
            parts = {unfinished / name: part for name, part in _shards(headers).items()}
        if len(parts) > 1:
            places = {name: part.name for part, held in parts.items() for name in held}
            index = {"metadata": {"total_size": nbytes}, "weight_map": places}
            write_new(unfinished / INDEX_FILE, _json(index))
            others += [INDEX_FILE, *(part.name for part in parts)]
        for part, held in parts.items():
            values = (tensors[name][1]() for name in held)
            about = {_STEP: str(step), _FILES: json.dumps(others), **version}
            write_safetensors(part, held, values, about)
        for name, content in (files or {}).items():
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
            text = content().encode(errors="replace") if callable(content) else content
            write_new(unfinished / name, text)
        for folder in (unfinished, *unfinished.rglob("*")):
            if folder.is_dir():
                sync_folder(folder)
        _reject_taken(path, is_folder=is_folder, force=force)
    return nbytes


def _shards(headers: Mapping[str, TensorHeader]) -> dict[str, dict[str, TensorHeader]]:
    """The tensors of each file of a folder, by its name: one file up to `FILE_BYTES`, else several
    in transformers' form, in which only a tensor of its own is larger."""
    shards: list[dict[str, TensorHeader]] = [{}]
    size = 0
    for name, header in headers.items():
        if shards[-1] and size + header.nbytes > FILE_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = header
        size += header.nbytes
    count, stem = len(shards), WHOLE_FILE.removesuffix(SUFFIX)
    if count == 1:
        return {WHOLE_FILE: shards[0]}
    return {f"{stem}-{n:05}-of-{count:05}{SUFFIX}": held for n, held in enumerate(shards, 1)}


def load(
    run: str | Path, *, step: int | Literal["best"] | None = None, trained: bool = False
) -> dict[str, Tensor]:
    """All weights and buffers of a checkpoint, dense, by global name ("block3.fc1.weight").

    `run` is a run directory, whose checkpoint of `step` is read, by default the newest, or one
    checkpoint in it; "best" has the lowest validation loss (`checkpoint.keep_best`). Values are the
    fp32 masters, with zeros at pruned positions; with `trained` they are the weights that training
    computes with, in its precision. A tied weight is there once, under the name of its first use;
    what a layer has under several names is there under each. One process reads it all; no MPI is
    needed.

    The state dict of an `nn.Sequential` that `from_sequential` made a model of has these names:

        modules.load_state_dict(ax.load("runs/my_run"))

    Raises MissingInputError if there is no such checkpoint, DataError if it is damaged.
    """
    weights = Weights(checkpoint_of(Path(expanded(run)), step), trained=trained)
    return weights.tensors()


class Weights:
    """The parameters and buffers of a checkpoint, each read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint, *, trained: bool) -> None:
        """Verifies the files of all layers first; raises the errors of `verify`."""
        self.checkpoint = checkpoint
        layers = checkpoint.manifest.layers
        verify(checkpoint, [layer.file for layer in layers.values()])
        self._files = CheckpointFiles(checkpoint)
        self.dtype = DTYPES[self.config().precision] if trained else torch.float32
        self.parameters: dict[str, ParameterEntry] = {}
        for layer in layers.values():
            self.parameters.update(layer.parameters)

    def config(self) -> Config:
        """The run's configuration; DataError if this version does not understand it."""
        manifest = self.checkpoint.manifest
        try:
            return Config.model_validate(manifest.config)
        except ValidationError as reason:
            key = ".".join(map(str, reason.errors(include_url=False)[0]["loc"]))[:100]
            raise DataError(
                f"checkpoint {self.checkpoint.path}: {key!r} of its configuration is none of this "
                "axsparse; use the version that wrote it"
            ) from reason

    def dense(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A parameter in its shape, with zeros at pruned positions, in `self.dtype` or `dtype`."""
        if self._files.has(VALUE, name):
            value = self._files.value(name, self.parameters[name].shape)
        else:
            value = self._files.dense(MASTER, name, self.dtype)
        return value.to(dtype or self.dtype)

    def _buffer(self, layer: str, name: str, header: TensorHeader, dtype: torch.dtype) -> Tensor:
        return self._files.buffer(layer, name, header).to(dtype)

    def by_name(self, dtype: Callable[[str], torch.dtype] | None = None) -> Tensors:
        """All parameters and buffers, layer by layer; `dtype(name)` may give a parameter or a
        buffer of floating-point numbers another type."""
        tensors: dict[str, tuple[TensorHeader, Value]] = {}
        for name, layer in self.checkpoint.manifest.layers.items():
            for parameter, entry in layer.parameters.items():
                kind = self.dtype if dtype is None else dtype(parameter)
                value = partial(self.dense, parameter, kind)
                tensors[parameter] = TensorHeader(kind, entry.shape), value
            for key, header in self._files.headers(name).items():
                role, _, buffer = key.partition("/")
                if role == BUFFER:
                    kind = header.dtype
                    if dtype is not None and kind.is_floating_point:
                        kind = dtype(buffer)
                    value = partial(self._buffer, name, buffer, header, kind)
                    tensors[buffer] = replace(header, dtype=kind), value
        return tensors

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each parameter by its global name."""
        return {name: entry.shape for name, entry in self.parameters.items()}

    def tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers in memory."""
        return self.with_other_names({name: value() for name, (_, value) in self.by_name().items()})

    def with_other_names(self, tensors: Mapping[str, T]) -> dict[str, T]:
        """Tensors by name, also under the further names that the model has for them."""
        return with_other_names(tensors, self.checkpoint.manifest.other_names)


# -- where it appears -----------------------------------------------------------------------


def _reject_in_model(path: Path, model_from: str | None) -> None:
    if model_from is not None:
        reject_within(path, Path(model_from), "the model")


def _reject_taken(path: Path, *, is_folder: bool, force: bool) -> None:
    """OutputError unless there is nothing, an empty folder or, with `force`, an earlier export."""
    with _writing(path):
        if not path.is_symlink() and not path.exists():
            return
        is_empty = is_folder and path.is_dir() and not any(path.iterdir())
        is_ours = is_export(path) if is_folder else is_own(path, _MARK)
    if path.is_symlink() or not (is_empty or is_ours):
        raise OutputError(f"{path} is not what an export leaves, and stays; choose another place")
    if not is_empty and not force:
        raise OutputError(
            f"{path} is there already; choose another place, or give --force (in Python "
            "force=True) to replace it"
        )


def is_export(folder: Path) -> bool:
    """Whether an export has written all that is in this folder, as its weights say."""
    names = (WHOLE_FILE, SPARSE_FILE, *(path.name for path in folder.glob(f"*-00001-of-*{SUFFIX}")))
    for file in () if folder.is_symlink() else (folder / name for name in names):
        with suppress(OSError, DataError, ValueError, KeyError):
            written = {file.name, *json.loads(SafetensorsFile(file).metadata[_FILES])}
            there = (one for one in folder.rglob("*") if one.is_symlink() or one.is_file())
            return {one.relative_to(folder).as_posix() for one in there} == written
    return False


def _writing(path: Path) -> AbstractContextManager[None]:
    return writing(f"{path}:", "free the disk, or choose another place")


# -- folders of transformers ---------------------------------------------------------------


def configured_model(
    config: Config, shapes: Mapping[str, tuple[int, ...]], where: object
) -> tuple[Model, ModelProfile]:
    """The model of a configuration, without weights, and its profile; ConfigError, which names the
    place `where`, if parameters of other shapes were saved."""
    model = model_without_weights(config)
    profiled = profile(replace(model, example=None))
    if shapes != profiled.shapes:
        raise ConfigError(
            f"{where}: is of a model of your own, not of the {config.model.name} of its "
            "configuration; take its weights by ax.load, trainer.state_dict() or axsparse export "
            "--to torch, and evaluate it by ax.Trainer(…, resume=RUN).evaluate(), with "
            "train.eval_steps"
        )
    return model, profiled


def _published(config: Family, known: Tensors) -> Tensors:
    """Tensors as the folder of `model.from` names and stores them, else as transformers does."""
    tensors: dict[str, tuple[TensorHeader, Value]] = {}
    file = None
    if config.from_ is not None:
        with suppress(MissingInputError):
            file = open_weights(config.from_)

    def named(name: str, prefix: str) -> str:
        """A name without the prefix if the file, of the body alone, has it without."""
        bare = name.removeprefix(f"{prefix}.")
        return bare if file and bare in file.shapes else name

    if isinstance(config, GptConfig):
        for name, (header, value) in known.items():
            shape = tuple(turned(name, torch.empty(header.shape, device="meta")).shape)
            stored = TensorHeader(header.dtype, shape)
            there = named(gpt2_name(name), "transformer")
            tensors[there] = stored, partial(_turned, name, value)
        ties = [(gpt2_name("embed.token.weight"), gpt2_name("head.weight"))]
    else:
        assert isinstance(config, HfConfig), f"{config.name} is no model of transformers"
        causal = empty_model(config.hf)
        names, whole = PublishedNames(causal), surrounding(causal)[0]
        theirs = HfFile(file, causal) if file else None
        for name, (header, value) in known.items():
            if theirs and (same := theirs.named(name)):
                tensors[same] = header, value
                continue
            empty = torch.empty(header.shape, device="meta")
            for there, one in names.tensors(name, empty).items():
                stored = TensorHeader(header.dtype, tuple(one.shape))
                own = named(there, causal.base_model_prefix)
                tensors[own] = stored, partial(names.one, name, there, value)
        if file is None and whole is not causal:
            raise MissingInputError(
                f"model.from {config.from_}: its weights are gone, and an export copies those of "
                "the parts for other inputs than text; bring that folder back, with its weights"
            )
        ties = tied_names(whole)
        if file and theirs:
            for name in theirs.others:
                header = TensorHeader(file.dtype(name), file.shapes[name])
                tensors[name] = header, partial(file.read, name)
    held = file.shapes if file else {}
    for first, again in ties:
        if again in held and again not in tensors and first in tensors:
            tensors[again] = tensors[first] if first in held else tensors.pop(first)
    return tensors


def _turned(name: str, value: Value) -> Tensor:
    return turned(name, value())


def hf_files(
    config: Family, dtype: torch.dtype, tokenizer: ExportedTokenizer | None
) -> tuple[dict[str, bytes | Path], list[str]]:
    """The files next to weights of type `dtype`, by name, and remarks about them for the user.

    They are copies of the files of `model.from` as long as its folder is there, but for another
    template of the chats in the training data; otherwise they are made from the settings and from
    the tokenizer of the training data, and a remark says so. ConfigError if the folder of
    `model.from` has other settings meanwhile, DataError if its config.json cannot be read.
    """
    named, notes = str(dtype).removeprefix("torch."), []
    source = None if config.from_ is None else Path(config.from_)
    if source is not None and (source / CONFIG_FILE).is_file():
        there = model_settings(source / CONFIG_FILE, config.name)
        reject_other_sizes(source / CONFIG_FILE, there, config)
        theirs = read_json(source / CONFIG_FILE)
        typed = _typed(theirs if TORCH_DTYPE in theirs else {**theirs, "dtype": named}, named)
        # Then its bytes are kept, also where it names another type than the weights there have.
        same = typed == theirs or _has_type(source, dtype)
        text = (source / CONFIG_FILE).read_bytes() if same else _json(typed)
        files = _companions(source)
        files.pop(CARD, None)
        if tokenizer is not None and tokenizer.chat_template:
            files |= _learnt_chats(source, theirs, tokenizer)
        return {**files, CONFIG_FILE: text}, []
    files = {}
    texts: dict[str, dict[str, Any]] = {CONFIG_FILE: config_json(config, named)}
    if tokenizer is not None:
        texts |= tokenizer.files(config.sequence_length)
        ids = tokenizer.ids
        if source is not None:  # A published model begins and ends texts as its own settings say.
            ids = {key: texts[CONFIG_FILE].get(key, value) for key, value in ids.items()}
            texts[GENERATION] = with_ends(ids, tokenizer.chat_ends)
        texts[CONFIG_FILE] |= ids
        files = dict(tokenizer.template_files())
    if source is not None:
        notes = [
            f"model.from {config.from_} is gone: its other files, such as its tokenizer's, its "
            "generation_config.json and its licence, are not copied; copy them, or export where "
            "that path leads to it"
        ]
    return {**files, **{name: _json(text) for name, text in texts.items()}}, notes


def _learnt_chats(
    source: Path, config: Mapping[str, Any], tokenizer: ExportedTokenizer
) -> dict[str, bytes]:
    """The files of the training data's chat template and of the tokens that end an answer, unless
    the folder `source`, with this config.json, has the same."""
    settings, generation = (
        read_json(source / name) if (source / name).is_file() else {}
        for name in (SETTINGS, GENERATION)
    )
    same = settings.get("chat_template") == tokenizer.chat_template
    files = {} if same and not (source / JINJA).exists() else tokenizer.template_files()
    ids = ("bos_token_id", EOS, "pad_token_id")
    generation = generation or {key: config[key] for key in ids if key in config}
    stops = with_ends(generation, tokenizer.chat_ends)
    return files if stops == generation else {**files, GENERATION: _json(stops)}


def _has_type(source: Path, dtype: torch.dtype) -> bool:
    """Whether most weights of a folder are of a type; its weights may be there no more."""
    with suppress(DataError, MissingInputError):
        file = open_weights(source)
        return _usual(map(file.dtype, file.shapes)) == dtype
    return False


def _usual(types: Iterable[torch.dtype]) -> torch.dtype:
    """The type of most tensors."""
    return Counter(types).most_common(1)[0][0]


def _typed(theirs: Mapping[str, Any], named: str) -> dict[str, Any]:
    """A config.json with this type of weights, also of the text model within another."""
    typed: dict[str, Any] = {key: named for key in (TORCH_DTYPE, "dtype") if key in theirs}
    if isinstance(text := theirs.get(TEXT_CONFIG), Mapping):
        typed[TEXT_CONFIG] = _typed(text, named)
    return {**theirs, **typed}


def _companions(source: Path) -> dict[str, bytes | Path]:
    """The files of a folder that are neither weights nor the settings of the model, by their paths
    there, at any depth, and all of further modules of sentence-transformers; hidden folders are
    none of it."""
    found: dict[str, bytes | Path] = {}
    further: set[object] = set()
    with suppress(OSError, ValueError, TypeError, AttributeError):  # of another form: none
        modules = json.loads((source / MODULES).read_bytes())
        further = {module.get("path") for module in modules} - {""}
    for folder, subfolders, names in os.walk(source, followlinks=True):
        at = Path(folder)
        around = (at.resolve(), *at.resolve().parents)  # a link to these would have no end
        subfolders[:] = [
            name for name in subfolders if name[0] != "." and (at / name).resolve() not in around
        ]
        is_further = str(at.relative_to(source)) in further
        for one in (at / name for name in names if is_further or WEIGHTS.search(name) is None):
            if one.is_file():
                found[one.relative_to(source).as_posix()] = one
    found.pop(CONFIG_FILE, None)
    return dict(sorted(found.items()))


def with_card(text: str, source: Path) -> str:
    """A page about a model made of a folder's, with the licence and the like that begin the card of
    the folder, and its text."""
    card = source / CARD
    if not card.is_file():
        return text
    said = card.read_text(encoding="utf-8", errors="replace")
    # As huggingface_hub finds it: after white space, and also without an end of its last line.
    header = re.match(r"\s*---[\r\n]+.*?[\r\n]+---(\r\n|\n|$)", said, re.DOTALL)
    front = header[0] if header else ""
    rest = said.removeprefix(front)
    return f"{front.strip()}\n{text}\n{rest}" if front else f"{text}\n{rest}"


def _json(content: Mapping[str, Any]) -> bytes:
    return f"{json.dumps(content, indent=2)}\n".encode()


def _files(
    config: Config, dtype: torch.dtype, data: DataEntry
) -> tuple[dict[str, bytes | Path], list[str]]:
    """The files next to weights of a run, with the tokenizer of its data if it can be read."""
    lacks: list[str] = []
    tokenizer = None
    try:
        tokenizer = exported_tokenizer(config.data, data.name, data.fingerprint)
    except (DataError, MissingInputError) as reason:
        if config.model.from_ is None:
            lacks = [
                f"the folder has no tokenizer: {reason}; --set data.path=PATH names moved data"
            ]
    files, notes = hf_files(config.model, dtype, tokenizer)
    return files, notes or lacks


def _card(config: Family, path: Path, step: int) -> dict[str, bytes | Path]:
    """The card of the model that a run has trained for some steps, if that had one."""
    source = Path(config.from_ or "")
    if config.from_ is None or not (source / CARD).is_file():
        return {}
    text = f"# {path.name}\n\n{source.absolute().name}, trained by axsparse for {step:,} steps.\n"
    return {CARD: with_card(text, source).encode(errors="replace")}
