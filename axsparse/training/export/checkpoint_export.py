"""Exports the weights of a checkpoint, one tensor at a time, in forms that other libraries read.

    hf      a folder of model.safetensors, with transformers' names, and config.json
    torch   a safetensors file of dense tensors by global name
    sparse  the same, but a pruned NAME of shape (R, …) is in CSR, as R rows of C columns:
                NAME.indptr   R + 1    the position in the next two at which each row begins
                NAME.indices  kept     the column of each kept entry, ascending in a row
                NAME.values   kept     its value, which training may have made zero
                NAME.shape    int64    (R, …)

Pruned entries are zero in dense tensors. A tied weight is written once, under the name of its
first use. Buffers are written after the parameters of their layer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from axsparse.config.hf_config import CONFIG_FILE
from axsparse.config.schema import Config
from axsparse.data.run_tokenizer import ExportedTokenizer, exported_tokenizer
from axsparse.models.start_weights import WHOLE_FILE
from axsparse.models.zoo.hf_models import HfFamily, hf_model
from axsparse.runtime.errors import (
    ConfigError,
    DataError,
    MissingInputError,
    OutputError,
    writing,
)
from axsparse.runtime.files.atomic import new_path
from axsparse.runtime.files.safetensors import (
    SUFFIX,
    SafetensorsFile,
    TensorHeader,
    write_safetensors,
)
from axsparse.samo.precision import DTYPES, round_to
from axsparse.samo.state_bytes import INT32_LIMIT
from axsparse.training.checkpoint.layer_files import (
    BUFFER,
    MASTER,
    VALUE,
    CheckpointFiles,
    CheckpointMasks,
)
from axsparse.training.checkpoint.manifest import ParameterEntry
from axsparse.training.checkpoint.verification import Checkpoint, checkpoint_of, verify
from axsparse.training.export.hf_folder import COMPANIONS, HfFolder

Form = Literal["hf", "torch", "sparse"]
_FOLDER_FILES = {WHOLE_FILE, CONFIG_FILE}
_OF_WEIGHTS = ("model", "data", "batch", "precision")
"""The sections and settings that say what the weights are, and what they are good for."""
_STEP = "step"
"""Names the steps done, in the metadata of all that is exported."""


@dataclass(frozen=True)
class ExportSummary:
    """What was written."""

    checkpoint: Checkpoint
    tensors: int
    nbytes: int
    notes: Sequence[str] = ()
    """What the user should know of the export."""


# Reason: these are the arguments of the Python API, all but the first three optional.
def export(
    run: str | Path,
    form: Form,
    path: str | Path,
    *,
    step: int | Literal["best"] | None = None,
    trained: bool = False,
    force: bool = False,
) -> ExportSummary:
    """Verify a checkpoint and write its weights to `path`, complete or not at all.

    `run` and `step` name the checkpoint as in `load`. The values are the fp32 masters, or with
    `trained` the weights in the training precision. `force` replaces what an earlier export has
    written there. One process does this, while the run may go on.

    Raises ConfigError if the form does not suit the model or the path, OutputError if the path
    is taken or cannot be written, DataError or MissingInputError if the checkpoint is damaged
    or is removed meanwhile.
    """
    checkpoint, path = checkpoint_of(Path(run), step), Path(path)
    is_folder = form == "hf"
    if not is_folder and path.suffix != SUFFIX:
        raise ConfigError(f"--out: {str(path)!r} does not end in {SUFFIX}; add that")
    path = path.absolute()
    _refuse_taken(path, is_folder=is_folder, force=force)
    weights = Weights(checkpoint, trained=trained)
    family = _hf_family(weights) if is_folder else None
    if family is None:
        groups = _by_global_name(weights, is_csr=form == "sparse")
    else:
        groups = [_dense(weights, name) for name in weights.parameters]
    headers = {key: header for group in groups for key, header in group.headers.items()}
    metadata = {_STEP: str(checkpoint.step)}
    notes: Sequence[str] = ()
    with _new(path) as unfinished:
        if family is not None:
            tokenizer, untold = _tokenizer(weights)
            folder = HfFolder(
                unfinished, weights.config().model, family, weights.dtype, headers, tokenizer
            )
            folder.settings()  # refuses what transformers has not
            notes = folder.notes or ([] if folder.source is not None else untold)
            unfinished.mkdir()
            folder.write(weights.values(groups), metadata)
        else:
            write_safetensors(unfinished, headers, weights.values(groups), metadata)
        _refuse_taken(path, is_folder=is_folder, force=force)
    nbytes = sum(header.nbytes for header in headers.values())
    return ExportSummary(checkpoint, len(headers), nbytes, notes)


def load(
    run: str | Path, *, step: int | Literal["best"] | None = None, trained: bool = False
) -> dict[str, Tensor]:
    """All weights and buffers of a checkpoint, dense, by global name ("block3.fc1.weight").

    `run` is a run directory, whose checkpoint of `step` is read, by default the newest, or one
    checkpoint in it; "best" is that of the lowest validation loss (`checkpoint.keep_best`). Values
    are the fp32 masters, with zeros at pruned positions; with `trained` they are the weights that
    training computes with, in its precision. A tied weight is there once, under the name of its
    first use. One process reads it all; no MPI is needed.

    The state dict of an `nn.Sequential` that `from_sequential` made a model of has these names:

        modules.load_state_dict(ax.load("runs/my_run"))

    Raises MissingInputError if there is no such checkpoint, DataError if it is damaged.
    """
    weights = Weights(checkpoint_of(Path(run), step), trained=trained)
    tensors = {name: weights.dense(name) for name in weights.parameters}
    for layer, buffers in weights.buffers.items():
        tensors |= {name: weights.buffer(layer, name) for name in buffers}
    return tensors


@dataclass(frozen=True)
class Group:
    """The output tensors that one parameter or buffer of the checkpoint becomes."""

    headers: Mapping[str, TensorHeader]
    """By output name."""
    values: Callable[[], Iterator[Tensor]]
    """Reads the tensors, in the order of `headers`."""


class Weights:
    """The parameters and buffers of a checkpoint, each read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint, *, trained: bool) -> None:
        """Verifies the files of all layers first; raises what `verify` raises."""
        self.checkpoint = checkpoint
        layers = checkpoint.manifest.layers
        verify(checkpoint, [layer.file for layer in layers.values()])
        self._files = CheckpointFiles(checkpoint)
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
            for key, header in self._files.of_layer(name).headers.items():
                kind, _, tensor = key.partition("/")
                if kind == VALUE:
                    self._untrained[tensor] = header
                elif kind == BUFFER:
                    self.buffers[name][tensor] = header

    def config(self) -> Config:
        """The run's configuration; DataError if this version does not understand it.

        Settings of training that an earlier version knew and this one does not are left out: the
        weights do not depend on them.
        """
        settings = dict(self.checkpoint.manifest.config)
        for section, *leaf in _misunderstood(settings):
            if section in _OF_WEIGHTS or not leaf:
                key = ".".join([section, *leaf])[:100]
                raise DataError(
                    f"checkpoint {self.checkpoint.path}: {key!r} of its configuration is none of "
                    "this axsparse; export it with the version that wrote it"
                )
            values = settings[section].items()
            settings[section] = {key: value for key, value in values if key != leaf[0]}
        return Config.model_validate(settings)

    def is_pruned(self, name: str) -> bool:
        """Whether some entries of a parameter are pruned."""
        return name in self._masks.kept

    def dtype_of(self, name: str) -> torch.dtype:
        """The type in which a parameter is written.

        Parameters that are not trained have no masters: they were rounded when the run began.
        """
        there = self._untrained.get(name)
        if there is not None and (self._trained or not there.dtype.is_floating_point):
            return there.dtype
        return self.dtype

    def dense(self, name: str) -> Tensor:
        """A parameter in its shape, with zeros at pruned positions."""
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
        """A buffer in the type in which it was saved."""
        file = self._files.of_layer(layer)
        return file.read(f"{BUFFER}/{name}", self.buffers[layer][name])

    def values(self, groups: Sequence[Group]) -> Iterator[Tensor]:
        """The tensors of all groups in turn; MissingInputError if the checkpoint is removed."""
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


def _misunderstood(settings: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The places of the settings that this version does not know, or not with these values."""
    try:
        Config.model_validate(settings)
    except ValidationError as error:
        return [tuple(map(str, problem["loc"])) for problem in error.errors(include_url=False)]
    return []


# -- what is written ------------------------------------------------------------------------


def _hf_family(weights: Weights) -> HfFamily:
    """How transformers stores the model; ConfigError if it has none or it is not the configured."""
    path, config = weights.checkpoint.path, weights.config().model
    found = hf_model(config)
    if found is None:
        raise ConfigError(
            f"--to hf: {path} is of model.name {config.name}, and only a gpt or a llama has a "
            "place in Hugging Face's transformers; choose --to torch"
        )
    shapes = {name: entry.shape for name, entry in weights.parameters.items()}
    family, surveyed = found
    if shapes != surveyed.shapes:
        raise ConfigError(
            f"--to hf: {path} is of a model of your own, not of the {config.name} of its "
            "configuration; choose --to torch"
        )
    return family


def _tokenizer(weights: Weights) -> tuple[ExportedTokenizer | None, list[str]]:
    """The tokenizer of the run's data, if it is known, and a note if it cannot be read any more."""
    data = weights.checkpoint.manifest.data
    try:
        return exported_tokenizer(weights.config().data, data.name, data.fingerprint), []
    except (DataError, MissingInputError) as reason:
        return None, [f"the folder has no tokenizer: {reason}"]


def _by_global_name(weights: Weights, *, is_csr: bool) -> list[Group]:
    """All parameters and buffers, layer by layer."""
    groups = []
    for name, layer in weights.checkpoint.manifest.layers.items():
        for parameter in layer.parameters:
            is_sparse = is_csr and weights.is_pruned(parameter)
            groups.append((_csr if is_sparse else _dense)(weights, parameter))
        for buffer, header in weights.buffers[name].items():
            groups.append(Group({buffer: header}, _one(weights.buffer, name, buffer)))
    return groups


def _dense(weights: Weights, name: str) -> Group:
    header = TensorHeader(weights.dtype_of(name), weights.parameters[name].shape)
    return Group({name: header}, _one(weights.dense, name))


def _csr(weights: Weights, name: str) -> Group:
    """A pruned parameter in CSR; its columns are all dimensions but the first, flattened.

    Both index tensors have the same integer type, since torch and scipy want that.
    """
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

    headers = {
        f"{name}.indptr": TensorHeader(integer, (rows + 1,)),
        f"{name}.indices": TensorHeader(integer, (kept,)),
        f"{name}.values": TensorHeader(weights.dtype_of(name), (kept,)),
        f"{name}.shape": TensorHeader(torch.int64, (len(shape),)),
    }
    return Group(headers, values)


def _one(read: Callable[..., Tensor], *names: str) -> Callable[[], Iterator[Tensor]]:
    """The `values` of a group of one tensor, which `read` reads when it is asked for."""
    return lambda: (read(*names) for _ in (None,))


# -- where it appears -----------------------------------------------------------------------


def _refuse_taken(path: Path, *, is_folder: bool, force: bool) -> None:
    """OutputError if something is there already.

    Allowed are an empty folder and, with `force`, what an earlier export left there.
    """
    with writing(f"--out: {path}", "free the disk, or choose another place"):
        if not path.is_symlink() and not path.exists():
            return
        inside = sorted(one.name for one in path.iterdir()) if path.is_dir() else None
        is_empty = is_folder and inside == []
        is_ours = path.is_file() if not is_folder else _is_export(path, set(inside or ["?"]))
    if path.is_symlink() or not (is_empty or is_ours):
        raise OutputError(
            f"--out: {path} is not what an export leaves, and stays; choose another place"
        )
    if not is_empty and not force:
        raise OutputError(
            f"--out: {path} is there already; choose another place, or give --force to replace it"
        )


def _is_export(folder: Path, inside: set[str]) -> bool:
    """Whether an export may have written these files.

    Other programs write a tokenizer's files too, so that beside them the weights must say that
    they were exported.
    """
    if inside <= _FOLDER_FILES:
        return True
    if not inside <= {*_FOLDER_FILES, *COMPANIONS}:
        return False
    try:
        return _STEP in SafetensorsFile(folder / WHOLE_FILE).metadata
    except (OSError, DataError):
        return False


@contextlib.contextmanager
def _new(path: Path) -> Iterator[Path]:
    """As `new_path`, with OutputError in place of OSError; makes the folder that `path` is in."""
    with writing(f"--out: {path}", "free the disk, or choose another place"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with new_path(path) as unfinished:
            yield unfinished
