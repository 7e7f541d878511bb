"""Starts a model at the values of a file of named tensors, which is read one tensor at a time.

The names are global names of the model, or another library's, which a function translates. Files
are safetensors, or an index of several; of a folder, its safetensors are read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from axsparse.models.layer import Model, StartValues, check_model, mismatched_values
from axsparse.models.model_profile import match, profile
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError, check_kinds, reading
from axsparse.runtime.files.paths import expanded
from axsparse.runtime.files.safetensors import (
    INDEX_SUFFIX,
    SPARSE_FILE,
    SUFFIX,
    SafetensorsFile,
    SafetensorsIndex,
    SparseFile,
    open_regular,
)

WHOLE_FILE, INDEX_FILE = f"model{SUFFIX}", f"model{INDEX_SUFFIX}"
PICKLED = ".bin"
"""Ending of Hugging Face's older files."""
MOST_NAMED = 8
"""Names and patterns that a text lists at most."""
SAMPLES, SAMPLE_BYTES = 16, 65_536
"""A fingerprint covers SAMPLES + 1 blocks of a file, and its length."""
_NUMBERED = re.compile(r"(?:\D*?\.(?!\d))?([^\d.]*\.?)(\d{1,9})(\D.*)", re.DOTALL)
"""A name with the number of a layer, which is the first one in it, behind the name of a list, which
a model around the text model has in another place."""
Convert = Callable[[str, Tensor], Tensor]
"""`convert(global name, tensor of the file)` returns the tensor as the model has it."""


class WeightFile(Protocol):
    """A file of named tensors, opened for reading.

    `SafetensorsFile`, `SafetensorsIndex` and `SparseFile` are such files, and `open_weights`
    chooses among them. To add a format, write a class with these members and return it there.
    Opening a file reads names and shapes, and no tensors if the format permits; it raises
    MissingInputError or DataError, and must never run code that the file contains. All ranks
    open the same file at once.
    """

    @property
    def path(self) -> Path:
        """The file that was opened; error messages name it."""

    @property
    def files(self) -> Sequence[Path]:
        """All files that tensors are read from, and `path`; the fingerprint covers them."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, by its name in the file."""

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor of a name in `shapes`."""

    def read(self, name: str) -> Tensor:
        """The tensor of a name in `shapes`: on the CPU, in the type that it has in the file.

        Called several times for a name, and only for tensors of the rank's own stage; hence
        nothing large is kept between calls.
        """


def open_weights(path: str | Path) -> WeightFile:
    """Open a file of weights, or the safetensors of a folder that Hugging Face's library wrote.

    Raises MissingInputError if it cannot be read, DataError if it holds no weights.
    """
    path = Path(expanded(path))
    with reading(f"weights {str(path)!r}:", "name a safetensors file"):
        if path.is_dir():
            path = _weights_in(path)
        open_regular(path).close()
    if path.name.endswith(INDEX_SUFFIX):
        return SafetensorsIndex(path)
    if path.name == SPARSE_FILE:
        return SparseFile(path)
    if path.suffix != SUFFIX:
        raise DataError(
            f"{path}: is no {SUFFIX}, and pickled weights may run code when they are read; save "
            "them by save_file of safetensors.torch, or save_pretrained of transformers"
        )
    return SafetensorsFile(path)


def _weights_in(folder: Path) -> Path:
    """The file of weights in a folder, or the index of several."""
    for name in (WHOLE_FILE, INDEX_FILE, SPARSE_FILE):
        if (folder / name).exists():
            return folder / name
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix == PICKLED)
    note = f"; {pickled[0]} is pickled, which may run code when it is read" if pickled else ""
    raise MissingInputError(
        f"weights {str(folder)!r}: has neither {WHOLE_FILE} nor {INDEX_FILE}{note}; name a folder "
        "that save_pretrained of a recent transformers wrote"
    )


def fingerprint(*files: Path) -> str:
    """A digest of files' lengths and of samples of their contents, equal for equal files."""
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        size = path.stat().st_size
        digest.update(str(size).encode())
        with path.open("rb") as file:
            for number in range(SAMPLES + 1):
                file.seek(max(0, size - SAMPLE_BYTES) * number // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


def unchanged(_: str, tensor: Tensor) -> Tensor:
    """A `Convert` for files whose tensors are as the model has them."""
    return tensor


@dataclass(frozen=True)
class FromFile:
    """`StartValues` that are read from a file; `start_from` has checked names and shapes."""

    file: WeightFile
    names: Mapping[str, str]
    """Global name → name in the file, for every tensor that the file contains."""
    convert: Convert
    fingerprint: str
    trained: Mapping[str, bool]
    """Whether a tensor of real numbers is trained, by its global name; buffers are not."""
    new: tuple[str, ...] = ()
    """Global names that begin as the model would without the file."""
    unused: tuple[str, ...] = ()
    """The names that these tensors would have in the file."""
    without: StartValues | None = None
    """The start of the model without the file; None leaves that to its layers."""

    def dtype(self, name: str) -> torch.dtype:
        """The type that a tensor has in the file; fp32 for one that begins anew."""
        there = self.names.get(name)
        return torch.float32 if there is None else self.file.dtype(there)

    def read(self, name: str) -> Tensor | None:
        """DataError for a tensor of real numbers that has another kind of numbers in the file, and
        for a trained one with NaN or infinities."""
        there = self.names.get(name)
        if there is None:
            return None if self.without is None else self.without.read(name)
        tensor = self.file.read(there)
        odd = mismatched_values(tensor, trained=self.trained[name]) if name in self.trained else ""
        if odd:
            raise DataError(
                f"{self.file.path}: {there!r} is {odd}; correct the file, or let {name} of the "
                f"model begin anew (model.new: [{name}], in Python new=)"
            )
        return self.convert(name, tensor)

    def note(self) -> str:
        """A text for the user that names the tensors that begin anew; empty if there are none."""
        if not self.new:
            return ""
        left = f"; left out of it: {some_of(self.unused)}" if self.unused else ""
        return f"{self.file.path}: new, and not from the file: {some_of(self.new)}{left}"


LEFT_OVER = re.compile(
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(attn|attention)\.(masked_bias|causal_mask)$"
    r"|(^|\.)(decoder\.version|position_ids)$|embed_positions\.weights$"
)
"""Names of buffers that older versions of transformers and fairseq saved."""

LOAD = "load weights (model.from or model.weights; a model of a program by ax.start_from)"
"""The suggestion where a model starts from drawn values."""


def some_of(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"{', '.join(names[:MOST_NAMED])}{more}"


# Reason: these are the arguments of the Python API, all but the first two optional.
def start_from(
    model: Model,
    file: WeightFile,
    *,
    named: Callable[[str], str] = str,
    convert: Convert = unchanged,
    ignored: Callable[[str], bool] = lambda _: False,
    new: Sequence[str] = (),
    depth: str = "",
) -> Model:
    """A copy of the model that starts at the values of a file, such as a pretrained body.

    `named(global name)` returns the name of a parameter or buffer in the file, and `convert(global
    name, tensor)` turns the file's tensor into the model's; neither is used for a file that has the
    global names. `ignored(name in the file)` says whether the model does not need a tensor. `new`
    has patterns of global names, such as "head.*", that begin as they would without the file,
    whatever it holds in their places; the start of the run names them. `depth` names the setting of
    the number of layers, for a file that has more of them.

    Raises DataError unless the file holds every other parameter and buffer of the state dict, in
    its shape, and nothing else; ConfigError for a pattern that matches none.
    """
    functions = dict.fromkeys(("named", "convert", "ignored"), "function")
    check_kinds("start_from", locals(), new="list", **functions)
    check_model("start_from", model)
    if not hasattr(file, "shapes"):
        raise ConfigError(
            f"start_from: file is {type(file).__name__}; open one by ax.open_weights(PATH)"
        )
    profiled = profile(replace(model, example=None))
    buffers = [buffer for layer in profiled.layers for buffer in layer.buffers]
    needed = profiled.shapes | {each.name: each.shape for each in buffers if each.persists}
    fresh = match(new, list(needed), "new", "no tensor of the model")
    needed = {name: shape for name, shape in needed.items() if name not in fresh}
    if needed.keys() <= file.shapes.keys():
        named, convert = str, unchanged
    names = {name: named(name) for name in needed}
    for second, first in profiled.ties.items():  # a file may hold one of the names, either of them
        if first in names and names[first] not in file.shapes and named(second) in file.shapes:
            names[first] = named(second)
    lacking = [name for name, there in names.items() if there not in file.shapes]
    if lacking:
        there, way = names[lacking[0]], f"take the file of a {model.name} model"
        longer = next((one for one in file.shapes if one.endswith(f".{there}")), there)
        prefix = longer.removesuffix(there)
        if {f"{prefix}{one}" for one in names.values()} <= file.shapes.keys():
            way = f"write it with names that do not begin with {prefix!r}"
        elif len(lacking) < len(names):
            way += _or_anew(lacking, needed)
        raise DataError(
            f"{file.path}: has no tensor {there!r}, which is {lacking[0]} of the model"
            f"{_and_more(lacking)}; {way}"
        )
    _check_shapes(file, names, needed, convert)
    again = {**profiled.other_names, **profiled.ties}
    seconds = {named(second): named(first) for second, first in again.items()}
    _check_ties(file, seconds)
    unused = tuple(there for name in fresh if (there := _name_in(file, named, name)))
    known = {*names.values(), *seconds, *unused}
    spare = [name for name in file.shapes if name not in known and not ignored(name)]
    if spare:
        more = f" and {len(spare) - 1} more" if len(spare) > 1 else ""
        way = f"take the file of a {model.name} model, or write it without what it does not need"
        layers = _depth_of(spare, known)
        if depth and layers:
            way = f"set {depth} to {layers}, the number of its layers"
        raise DataError(f"{file.path}: holds {spare[0]!r}{more}, which the model lacks; {way}")
    digest = f"{file.path.name} {fingerprint(*file.files)}"
    if fresh:
        digest += f", without {' '.join(fresh)} {model.start.fingerprint if model.start else ''}"
    trained = {p.name: p.trained for layer in profiled.layers for p in layer.parameters}
    trained |= {each.name: False for each in buffers if each.dtype.is_floating_point}
    start = FromFile(file, names, convert, digest, trained, tuple(fresh), unused, model.start)
    return replace(model, start=start)


def is_left_over(shapes: Mapping[str, tuple[int, ...]], name: str) -> bool:
    """Whether a tensor of a file is one that older versions of transformers saved, and nobody
    needs, such as a mask (1, 1, S, S) that attention has as its `bias`."""
    if LEFT_OVER.search(name):
        return True
    shape = shapes[name]
    is_mask = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return is_mask and re.search(r"(attn|attention)\.bias$", name) is not None


def _depth_of(spare: Sequence[str], known: Set[str]) -> int:
    """The number of layers in a file whose further layers are all that the model lacks; else 0."""
    here = [match for name in known if (match := _NUMBERED.fullmatch(name))]
    more = [match for name in spare if (match := _NUMBERED.fullmatch(name))]
    kinds = {(match[1], match[3]) for match in more}
    if len(more) < len(spare) or not kinds <= {(match[1], match[3]) for match in here}:
        return 0
    start, numbers = more[0][1], {int(match[2]) for match in more}
    first = 1 + max(int(match[2]) for match in here if match[1] == start)
    is_all = min(numbers) == first and max(numbers) - first + 1 == len(numbers)
    return max(numbers) + 1 if is_all and {start} == {match[1] for match in more} else 0


def _name_in(file: WeightFile, named: Callable[[str], str], name: str) -> str:
    """The name in the file of a tensor that begins anew; empty if the file has none."""
    try:
        there = named(name)
    except KeyError:  # The file's library has no such tensor.
        return ""
    return there if there in file.shapes else ""


def _check_shapes(
    file: WeightFile,
    names: Mapping[str, str],
    needed: Mapping[str, tuple[int, ...]],
    convert: Convert,
) -> None:
    """Raise DataError if converted tensors have not the shapes that the model wants."""
    found = {
        name: tuple(convert(name, torch.empty(file.shapes[there], device="meta")).shape)
        for name, there in names.items()
    }
    others = [name for name, shape in found.items() if shape != needed[name]]
    for name in others[:1]:
        there = names[name]
        turned = f", which is read as {found[name]}" * (found[name] != file.shapes[there])
        raise DataError(
            f"{file.path}: {there!r} has shape {file.shapes[there]}{turned}, {name} of the model "
            f"has {needed[name]}{_and_more(others)}; make the model's settings those of the file"
            f"{_or_anew(others, needed)}"
        )


def _or_anew(names: Sequence[str], needed: Iterable[str]) -> str:
    """How these tensors, of those needed, begin as without a file, with patterns for all of a
    module; empty where that is no short list."""
    patterns = []
    for name in names:
        module = name.rpartition(".")[0]
        of_module = {one for one in needed if one.startswith(f"{module}.")}
        patterns.append(f'"{module}.*"' if of_module - {name} and of_module <= {*names} else name)
    listed = [*dict.fromkeys(patterns)]
    if len(listed) > MOST_NAMED:
        return ""
    which = "them" if len(names) > 1 else "it"
    return f", or let {which} begin anew (model.new: [{', '.join(listed)}], in Python new=)"


def _and_more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _check_ties(file: WeightFile, seconds: Mapping[str, str]) -> None:
    """DataError if a tied weight has two values; `seconds` maps second names to first ones."""
    for second, first in seconds.items():
        both = {first, second} <= file.shapes.keys()
        if both and not torch.equal(file.read(second), file.read(first)):
            raise DataError(
                f"{file.path}: {first!r} and {second!r} differ, and are one weight in the model; "
                "take them apart in the model (tie_word_embeddings: false at the top of its "
                "config.json, without one model.tie_embeddings: false)"
            )
