"""Turns a checkpoint into weights that other libraries read, one tensor at a time.

    hf      a folder: model.safetensors by transformers' names of GPT-2, and config.json
    torch   a safetensors file by global names, dense
    sparse  the same, with a pruned NAME of shape (R, …) and C = entries / R in CSR:
                NAME.indptr   R + 1    where in the next two each row begins
                NAME.indices  kept     column of each kept entry, ascending in a row
                NAME.values   kept     zeros that training made included
                NAME.shape    int64    (R, …)

Pruned entries are zero in dense tensors. A tied weight is there once, under its first use;
buffers stand beside the parameters of their layer.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.data.prepare.whole_files import writes
from axsparse.models.start_weights import WHOLE_FILE
from axsparse.models.survey import survey
from axsparse.models.zoo.gpt import gpt
from axsparse.models.zoo.hf_gpt2 import CONFIG_FILE, gpt2_name, gpt2_settings, turned
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError, OutputError
from axsparse.runtime.files.durable import sync_folder, write_new
from axsparse.runtime.files.safetensors import SUFFIX, TensorHeader, write_safetensors
from axsparse.samo.precision import DTYPES, round_to
from axsparse.samo.state_bytes import INT32_LIMIT
from axsparse.training.checkpoint.layer_files import BUFFER, MASTER, VALUE
from axsparse.training.checkpoint.manifest import ParameterEntry
from axsparse.training.checkpoint.restore import CheckpointMasks, Files
from axsparse.training.checkpoint.verification import Checkpoint, verify

Form = Literal["hf", "torch", "sparse"]
_OF_FOLDERS = {WHOLE_FILE, CONFIG_FILE}


@dataclass(frozen=True)
class ExportSummary:
    """What was written."""

    tensors: int
    nbytes: int


def export(
    checkpoint: Checkpoint, form: Form, path: Path, *, trained: bool = False, force: bool = False
) -> ExportSummary:
    """Write the weights of a checkpoint, whose files are verified first, to a file or folder
    that appears whole or not at all.

    Values are the fp32 masters, or, if `trained`, the weights in the training precision.
    `force` replaces what an export has written there before.

    Raises ConfigError for a form that the model or the path has not, OutputError for a path
    that is taken or cannot be written, DataError or MissingInputError for a checkpoint that
    is damaged or goes away.
    """
    is_folder = form == "hf"
    if not is_folder and path.suffix != SUFFIX:
        raise ConfigError(f"--out: {str(path)!r} does not end in {SUFFIX}; add that")
    path = path.absolute()
    _refuse_taken(path, is_folder=is_folder, force=force)
    weights = Weights(checkpoint, trained=trained)
    groups = _as_gpt2(weights) if is_folder else _by_global_name(weights, is_csr=form == "sparse")
    described = {key: one for group in groups for key, one in group.described.items()}
    metadata = {"step": str(checkpoint.step)}
    with _new(path) as unfinished:
        file = unfinished
        if is_folder:
            unfinished.mkdir()
            file = unfinished / WHOLE_FILE
            settings = gpt2_settings(weights.config().model, weights.dtype)
            text = json.dumps(settings, indent=2)
            write_new(unfinished / CONFIG_FILE, f"{text}\n".encode())
        write_safetensors(file, described, weights.values(groups), metadata)
        if is_folder:
            sync_folder(unfinished)
        _refuse_taken(path, is_folder=is_folder, force=force)
        _put(unfinished, path, is_folder=is_folder)
    return ExportSummary(len(described), sum(one.nbytes for one in described.values()))


@dataclass(frozen=True)
class Group:
    """Tensors of the output that come from one of the checkpoint."""

    described: Mapping[str, TensorHeader]
    values: Callable[[], Iterator[Tensor]]
    """In the order of `described`."""


class Weights:
    """Parameters and buffers of a whole checkpoint, read when they are asked for."""

    def __init__(self, checkpoint: Checkpoint, *, trained: bool) -> None:
        """Reads all files of layers; raises what `verify` raises."""
        self.checkpoint = checkpoint
        layers = checkpoint.manifest.layers
        verify(checkpoint, [layer.file for layer in layers.values()])
        self._files = Files(checkpoint)
        self._masks = CheckpointMasks(checkpoint)
        self.dtype = DTYPES[self.config().precision] if trained else torch.float32
        self._trained = trained
        self._untrained: dict[str, TensorHeader] = {}
        self.parameters: dict[str, ParameterEntry] = {}
        self.buffers: dict[str, dict[str, TensorHeader]] = {}
        """By layer and global name."""
        for name, layer in layers.items():
            self.parameters.update(layer.parameters)
            self.buffers[name] = {}
            for key, described in self._files.of_layer(name).described.items():
                kind, _, tensor = key.partition("/")
                if kind == VALUE:
                    self._untrained[tensor] = described
                elif kind == BUFFER:
                    self.buffers[name][tensor] = described

    def config(self) -> Config:
        """That of the run; DataError if this version does not know such."""
        try:
            return Config.model_validate(self.checkpoint.manifest.config)
        except ValidationError as error:
            key = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))
            raise DataError(
                f"checkpoint {self.checkpoint.path}: {key[:100]!r} of its configuration is none of "
                "this axsparse; export it with the version that wrote it"
            ) from error

    def is_pruned(self, name: str) -> bool:
        """Whether only a part of a parameter's entries is kept."""
        return name in self._masks.kept

    def dtype_of(self, name: str) -> torch.dtype:
        """The type of a parameter's values; untrained ones were rounded when the run began."""
        there = self._untrained.get(name)
        if there is not None and (self._trained or not there.dtype.is_floating_point):
            return there.dtype
        return self.dtype

    def dense(self, name: str) -> Tensor:
        """A parameter in its shape."""
        shape = self.parameters[name].shape
        kept_K = self.kept(name)
        if not self.is_pruned(name):
            return kept_K.view(shape)
        mask_D = self.mask(name)
        dense_D = torch.zeros(mask_D.shape, dtype=kept_K.dtype)
        return dense_D.masked_scatter_(mask_D, kept_K).view(shape)

    def kept(self, name: str) -> Tensor:
        """The kept entries of a parameter, flat."""
        entry, file = self.parameters[name], self._files.of(name)
        if name in self._untrained:
            wanted = TensorHeader(self._untrained[name].dtype, entry.shape)
            value = file.read(f"{VALUE}/{name}", wanted)
            return value.to(self.dtype_of(name)).view(-1)
        master = file.read(f"{MASTER}/{name}", TensorHeader(torch.float32, (entry.kept,)))
        return round_to(master, self.dtype)

    def mask(self, name: str) -> Tensor:
        """The flat mask of a pruned parameter."""
        return self._masks.mask(name, self.parameters[name].shape, partial(self.dense, name))

    def buffer(self, layer: str, name: str) -> Tensor:
        """A buffer as it is."""
        file = self._files.of_layer(layer)
        return file.read(f"{BUFFER}/{name}", self.buffers[layer][name])

    def values(self, groups: Sequence[Group]) -> Iterator[Tensor]:
        """All tensors of some groups; MissingInputError if the checkpoint is removed meanwhile."""
        for group in groups:
            tensors = group.values()
            while True:
                try:
                    tensor = next(tensors, None)
                except OSError as reason:
                    raise MissingInputError(
                        f"checkpoint {self.checkpoint.path}: cannot be read any more "
                        f"({reason.strerror}); export another one, or one that the run keeps"
                    ) from reason
                if tensor is None:
                    break
                yield tensor


# -- what is written ------------------------------------------------------------------------


def _as_gpt2(weights: Weights) -> list[Group]:
    """A GPT as transformers has it; ConfigError for any other model."""
    path, config = weights.checkpoint.path, weights.config().model
    if config.name != "gpt":
        raise ConfigError(
            f"--to hf: {path} is of model.name {config.name}, and only a gpt has a place in "
            "Hugging Face's GPT-2; choose --to torch"
        )
    shapes = {name: entry.shape for name, entry in weights.parameters.items()}
    if shapes != survey(gpt(config, config.sequence_length)).shapes:
        raise ConfigError(
            f"--to hf: {path} is of a model of your own, not of the GPT of its configuration; "
            "choose --to torch"
        )

    def turned_dense(name: str) -> Tensor:
        return turned(name, weights.dense(name))

    def of(name: str) -> Group:
        shape = turned(name, torch.empty(shapes[name], device="meta")).shape
        described = TensorHeader(weights.dtype_of(name), tuple(shape))
        return Group({gpt2_name(name): described}, _one(turned_dense, name))

    return [of(name) for name in shapes]


def _by_global_name(weights: Weights, *, is_csr: bool) -> list[Group]:
    """All parameters and buffers, layer by layer."""
    groups = []
    for name, layer in weights.checkpoint.manifest.layers.items():
        for parameter in layer.parameters:
            is_sparse = is_csr and weights.is_pruned(parameter)
            groups.append((_csr if is_sparse else _dense)(weights, parameter))
        for buffer, described in weights.buffers[name].items():
            groups.append(Group({buffer: described}, _one(weights.buffer, name, buffer)))
    return groups


def _dense(weights: Weights, name: str) -> Group:
    described = TensorHeader(weights.dtype_of(name), weights.parameters[name].shape)
    return Group({name: described}, _one(weights.dense, name))


def _csr(weights: Weights, name: str) -> Group:
    """A pruned parameter, all dimensions but the first as one; torch and scipy want the same
    integers for both indices."""
    shape, kept = weights.parameters[name].shape, weights.parameters[name].kept
    rows, columns = shape[0], math.prod(shape[1:])
    integer = torch.int32 if max(kept, columns) <= INT32_LIMIT else torch.int64

    def values() -> Iterator[Tensor]:
        mask = weights.mask(name).view(rows, columns)
        indptr = torch.zeros(rows + 1, dtype=integer)
        indptr[1:] = mask.sum(1).cumsum(0)
        yield indptr
        yield mask.view(-1).nonzero().view(-1).remainder_(columns).to(integer)
        yield weights.kept(name)
        yield torch.tensor(shape)

    described = {
        f"{name}.indptr": TensorHeader(integer, (rows + 1,)),
        f"{name}.indices": TensorHeader(integer, (kept,)),
        f"{name}.values": TensorHeader(weights.dtype_of(name), (kept,)),
        f"{name}.shape": TensorHeader(torch.int64, (len(shape),)),
    }
    return Group(described, values)


def _one(read: Callable[..., Tensor], *names: str) -> Callable[[], Iterator[Tensor]]:
    return lambda: (read(*names) for _ in (None,))


# -- where it appears -----------------------------------------------------------------------


def _refuse_taken(path: Path, *, is_folder: bool, force: bool) -> None:
    """OutputError for what is there already, but for an empty folder and, by `force`, what an
    export left there."""
    with writes(path):
        if not path.is_symlink() and not path.exists():
            return
        inside = sorted(one.name for one in path.iterdir()) if path.is_dir() else None
        is_empty = is_folder and inside == []
        is_ours = path.is_file() if not is_folder else set(inside or ["?"]) <= _OF_FOLDERS
    if path.is_symlink() or not (is_empty or is_ours):
        raise OutputError(
            f"--out: {path} is not what an export leaves, and stays; choose another place"
        )
    if not is_empty and not force:
        raise OutputError(
            f"--out: {path} is there already; choose another place, or give --force to replace it"
        )


@contextlib.contextmanager
def _new(path: Path) -> Iterator[Path]:
    """Where to write what is to be at `path`; what is left there in the end goes."""
    unfinished = path.with_name(f".{path.name}.unfinished-{secrets.token_hex(4)}")
    try:
        with writes(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            yield unfinished
    finally:
        _remove(unfinished)


def _put(unfinished: Path, path: Path, *, is_folder: bool) -> None:
    """Give what is on the disk its name; a folder that is replaced is aside for that moment."""
    if is_folder and path.exists():
        before = unfinished.with_name(f"{unfinished.name}.before")
        path.rename(before)
        try:
            unfinished.rename(path)
        except OSError:
            before.rename(path)
            raise
        sync_folder(path.parent)
        _remove(before)
    else:
        unfinished.replace(path)
        sync_folder(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
