"""Start values from a file of tensors by name, read one tensor at a time.

Names are those of the model, or those that another library has for it: then a function
says which is which. The ending of a file's name tells safetensors and an index of several;
anything else is a state dict as torch saves it. A folder stands for its safetensors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from axsparse.models.layer import Model
from axsparse.models.survey import Survey, survey
from axsparse.runtime.errors import DataError, MissingInputError
from axsparse.runtime.files.safetensors import (
    INDEX_SUFFIX,
    SUFFIX,
    SafetensorsFile,
    SafetensorsIndex,
)

WHOLE_FILE, INDEX_FILE = f"model{SUFFIX}", f"model{INDEX_SUFFIX}"
"""What Hugging Face's folders call the weights, or the index of their files."""
PICKLED = ".bin"
"""What Hugging Face's older files end with."""
SAMPLES, SAMPLE_BYTES = 16, 65_536
"""How much of a file's contents goes into its fingerprint, beside its length."""
COUNTER = "num_batches_tracked"
"""The one tensor that older files of batch normalisations lack; it starts at zero then."""
Convert = Callable[[str, Tensor], Tensor]


class WeightFile(Protocol):
    """A file of tensors by name."""

    @property
    def path(self) -> Path: ...

    @property
    def files(self) -> Sequence[Path]:
        """All that is read, `path` among them."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> Tensor:
        """One tensor, in the type that it has in the file."""
        ...


def _refuse_unsafe_torch(path: Path) -> None:
    """Before torch 2.6 a file could run code of its own even so (CVE-2025-32434)."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 6):
        raise DataError(
            f"{path}: torch {torch.__version__} may run code that it finds in such a file; take "
            "torch 2.6 or newer, or a .safetensors file"
        )


class TorchFile:
    """A state dict that `torch.save` wrote; mapped into memory, not read, where torch can.

    Files from before torch 1.6 are read whole and held until the model is built.
    """

    def __init__(self, path: Path) -> None:
        """DataError for what is no state dict, or holds more than tensors."""
        self.path = path
        self.files: Sequence[Path] = (path,)
        _refuse_unsafe_torch(path)
        try:
            try:
                loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # an older file, or a broken one
                loaded = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as reason:
            raise DataError(
                f"{path}: torch cannot read it as weights ({type(reason).__name__}: "
                f"{str(reason).splitlines()[0] if str(reason) else 'no reason given'}); save a "
                "state dict: torch.save(model.state_dict(), path)"
            ) from reason
        if not isinstance(loaded, Mapping) or not all(
            isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items()
        ):
            raise DataError(
                f"{path}: holds other things than tensors by name; save a state dict: "
                "torch.save(model.state_dict(), path)"
            )
        self._tensors: Mapping[str, Tensor] = loaded
        self.shapes = {name: tuple(tensor.shape) for name, tensor in loaded.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name].detach()


def open_weights(path: str | Path) -> WeightFile:
    """A file of weights, or those of a folder of Hugging Face's.

    MissingInputError if it cannot be read, DataError if it holds no weights.
    """
    path = Path(path)
    try:
        if path.is_dir():
            path = _weights_in(path)
        path.open("rb").close()
    except OSError as reason:
        raise MissingInputError(
            f"weights {str(path)!r}: cannot be read ({reason.strerror}); name a safetensors file "
            "or a state dict of torch's"
        ) from reason
    if path.name.endswith(INDEX_SUFFIX):
        return SafetensorsIndex(path)
    if path.suffix == PICKLED:
        raise DataError(
            f"{path}: pickled weights may run code when they are read; save them as safetensors "
            "(save_pretrained of a recent transformers)"
        )
    return SafetensorsFile(path) if path.suffix == SUFFIX else TorchFile(path)


def _weights_in(folder: Path) -> Path:
    """The file of a folder, or its index."""
    for name in (WHOLE_FILE, INDEX_FILE):
        if (folder / name).exists():
            return folder / name
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix == PICKLED)
    found = f"; {pickled[0]} is pickled, which may run code when it is read" if pickled else ""
    raise MissingInputError(
        f"weights {str(folder)!r}: has neither {WHOLE_FILE} nor {INDEX_FILE}{found}; name a folder "
        "that save_pretrained of a recent transformers wrote"
    )


def fingerprint(*files: Path) -> str:
    """Length and samples of the contents of files; the same for equal files on two hosts."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            for number in range(SAMPLES + 1):
                file.seek(max(0, size - SAMPLE_BYTES) * number // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def keep(_: str, tensor: Tensor) -> Tensor:
    """The conversion of tensors that are in a file as the model has them."""
    return tensor


def none(_: str) -> bool:
    """No tensor of a file is without use."""
    return False


@dataclass(frozen=True)
class FromFile:
    """`StartValues` of a file whose names and shapes fit the model."""

    file: WeightFile
    names: Mapping[str, str]
    """Global name → name in the file, of all that the file has."""
    convert: Convert
    fingerprint: str

    def read(self, name: str) -> Tensor | None:
        there = self.names.get(name)
        return None if there is None else self.convert(name, self.file.read(there))


def start_from(
    model: Model,
    file: WeightFile,
    *,
    named: Callable[[str], str] = str,
    convert: Convert = keep,
    ignored: Callable[[str], bool] = none,
) -> Model:
    """The model, starting at the values of a file instead of its own.

    `named(global name)` is what the file calls a parameter or buffer; a file of global
    names works, too. `convert(global name, tensor)` makes a tensor of the file one of the
    model. `ignored(name in the file)`: the model has no use for it.

    DataError unless every parameter and buffer is there in its shape, and nothing else.
    """
    surveyed = survey(model)
    wanted = _wanted(surveyed)
    if all(name in file.shapes or not needed.required for name, needed in wanted.items()):
        named, convert = str, keep
    names = {}
    for name, needed in wanted.items():
        there = named(name)
        if there in file.shapes:
            names[name] = there
            _check_shape(file, there, name, needed.shape, convert)
        elif f"{name}.indptr" in file.shapes:
            raise DataError(
                f"{file.path}: has {name!r} in CSR, which is not read back; export the checkpoint "
                "with --to torch"
            )
        elif needed.required:
            raise DataError(
                f"{file.path}: has no tensor {there!r}, which is {name} of the model; take the "
                f"file of a {model.name} model"
            )
    seconds = {named(second): named(first) for second, first in surveyed.ties.items()}
    _check_ties(file, seconds)
    known = {*names.values(), *seconds}
    spare = [name for name in file.shapes if name not in known and not ignored(name)]
    if spare:
        more = f" and {len(spare) - 1} more" if len(spare) > 1 else ""
        raise DataError(
            f"{file.path}: holds {spare[0]!r}{more}, which the model lacks; take the file of a "
            f"{model.name} model"
        )
    start = FromFile(file, names, convert, f"{file.path.name} {fingerprint(*file.files)}")
    return replace(model, start=start)


@dataclass(frozen=True)
class _Requirement:
    shape: tuple[int, ...]
    required: bool


def _wanted(surveyed: Survey) -> dict[str, _Requirement]:
    """What a file has to hold: parameters, a tied one once, and buffers that persist."""
    wanted = {}
    for layer in surveyed.layers:
        for parameter in layer.parameters:
            if parameter.name not in surveyed.ties:
                wanted[parameter.name] = _Requirement(parameter.shape, required=True)
        for buffer in layer.buffers:
            if buffer.persists:
                required = not buffer.name.endswith(COUNTER)
                wanted[buffer.name] = _Requirement(buffer.shape, required)
    return wanted


def _check_shape(
    file: WeightFile, there: str, name: str, wanted: tuple[int, ...], convert: Convert
) -> None:
    shape = tuple(convert(name, torch.empty(file.shapes[there], device="meta")).shape)
    if shape != wanted:
        turned = "" if shape == file.shapes[there] else f", which is read as {shape}"
        raise DataError(
            f"{file.path}: {there!r} has shape {file.shapes[there]}{turned}, {name} of the model "
            f"has {wanted}; make the model's settings those of the file"
        )


def _check_ties(file: WeightFile, seconds: Mapping[str, str]) -> None:
    """A file may hold a tied weight twice, but not two weights."""
    for second, first in seconds.items():
        if second in file.shapes and not torch.equal(file.read(second), file.read(first)):
            raise DataError(
                f"{file.path}: {first!r} and {second!r} differ, and are one weight in the model; "
                "take them apart in the model (model.tie_embeddings: false)"
            )
