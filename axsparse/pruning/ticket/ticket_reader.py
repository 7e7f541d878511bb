"""The file of a ticket, its manifest, and how it is read, under any layout.

A ticket is a safetensors file. For every pruned tensor, under its global name, it has a uint8
tensor with one bit an entry (1: kept), in the tensor's flat order. The first entry is the highest
bit of the first byte, and the last byte is filled up with zeros.

The manifest says who drew the masks, from which model, and how sparse they are. It is JSON in the
metadata of the file, beside its hash: {"ticket": manifest, "ticket_hash": BLAKE2b-128 of the
manifest in hex}. When it is read, values that follow from others are computed again and compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from axsparse.runtime.errors import ConfigError, DataError, reading
from axsparse.runtime.files.safetensors import SafetensorsFile, TensorHeader
from axsparse.runtime.version import __version__
from axsparse.samo.masks import Shape, Weight
from axsparse.samo.selection import Bits

FORMAT = 1
"""The version of the file format; files of another version are refused."""
TICKET_FILE = "ticket.safetensors"
"""The file in the run directory with the masks that the pruning method has found, as a ticket."""
MANIFEST_KEY, HASH_KEY = "ticket", "ticket_hash"
_PIECE = 1 << 20
"""How many packed bytes are counted at a time."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has letters that cannot be shown")
    return text


Count = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, AfterValidator(_printable)]
"""Text that may be shown in a message of one line."""
Sizes = Annotated[tuple[Count, ...], Field(max_length=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Entry(_Strict):
    """One pruned tensor."""

    shape: Sizes
    kept: Count
    sparsity: float
    """Fraction of the entries that is removed."""
    hash: Text
    """Hash of the packed bits."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class TicketManifest(_Strict):
    """Everything that a ticket contains beside the bits of its masks."""

    version: int
    algorithm: Text
    """`pruning.method` of the run that drew the masks."""
    step: Count
    """Steps that the run had done by then."""
    seed: int
    """The seed of that run."""
    axsparse: Text
    """The version of the package that wrote the ticket."""
    sparsity: float
    """Fraction of all entries of the pruned tensors that is removed."""
    hash: Text
    """Hash of the masks; equal if names, shapes and bits are equal, and only then."""
    tensors: dict[Text, Entry]
    """The pruned tensors by global name, in model order; a tied weight once, by its first use."""
    model_hash: Text
    """Hash of `parameters`."""
    parameters: dict[Text, Sizes]
    """The shapes of all parameters of the model by global name, in model order."""

    @property
    def kept(self) -> int:
        """Kept entries of all pruned tensors."""
        return sum(entry.kept for entry in self.tensors.values())

    @property
    def numel(self) -> int:
        """Entries of all pruned tensors."""
        return sum(entry.numel for entry in self.tensors.values())

    def text(self, indent: int | None = None) -> str:
        """The manifest as JSON."""
        return json.dumps(self.model_dump(), indent=indent)

    def metadata(self) -> dict[str, str]:
        """The metadata of the ticket's file."""
        text = self.text()
        return {MANIFEST_KEY: text, HASH_KEY: hash_of(text.encode())}


@dataclass(frozen=True)
class TicketOrigin:
    """Where the masks of a ticket come from; equal on all ranks."""

    algorithm: str
    """The run's `pruning.method`."""
    step: int
    """Steps done so far."""
    seed: int
    """The run's seed."""
    parameters: Mapping[str, Shape]
    """All parameters of the model, in model order; a tied weight once, by its first use."""


def make_manifest(
    origin: TicketOrigin, masks: Mapping[str, tuple[int, str]], version: str = __version__
) -> TicketManifest:
    """The manifest of a ticket, with all computed values.

    `masks` has the number of kept entries and the hash of each pruned tensor by global name.
    """
    tensors = {}
    for name, shape in origin.parameters.items():
        if name in masks:
            kept, bits = masks[name]
            sparsity = _sparsity(kept, math.prod(shape))
            tensors[name] = Entry(shape=shape, kept=kept, sparsity=sparsity, hash=bits)
    return TicketManifest(
        version=FORMAT,
        algorithm=origin.algorithm,
        step=origin.step,
        seed=origin.seed,
        axsparse=version,
        sparsity=_sparsity(
            sum(entry.kept for entry in tensors.values()),
            sum(entry.numel for entry in tensors.values()),
        ),
        hash=_hash_of_json([[name, entry.shape, entry.hash] for name, entry in tensors.items()]),
        tensors=tensors,
        model_hash=_hash_of_json(list(origin.parameters.items())),
        parameters=dict(origin.parameters),
    )


def read_manifest(path: Path, metadata: Mapping[str, Any]) -> TicketManifest:
    """The manifest in a file's metadata; DataError if it is missing, damaged or inconsistent."""
    text = metadata.get(MANIFEST_KEY)
    if not isinstance(text, str):
        raise DataError(
            f"{path}: no ticket, since it has no manifest; name a file that pruning wrote"
        )
    try:
        encoded = text.encode()
        version = operator.index(json.loads(text)["version"])
    except (ValueError, KeyError, TypeError, RecursionError) as reason:
        raise DataError(
            f"{path}: its manifest cannot be read ({type(reason).__name__}); get the ticket anew"
        ) from reason
    if version != FORMAT:
        raise DataError(
            f"{path}: a ticket of format {str(version)[:20]}, and this axsparse reads {FORMAT}; "
            "take the version that wrote it, or draw the ticket again"
        )
    if metadata.get(HASH_KEY) != hash_of(encoded):
        raise DataError(f"{path}: its manifest has another hash than it says; get the ticket anew")
    try:
        manifest = TicketManifest.model_validate_json(encoded)
    except ValidationError as reason:
        first = reason.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{path}: its manifest is malformed at {place!r} ({first['type']}); get the ticket anew"
        ) from reason
    computed = make_manifest(
        TicketOrigin(manifest.algorithm, manifest.step, manifest.seed, manifest.parameters),
        {name: (entry.kept, entry.hash) for name, entry in manifest.tensors.items()},
        manifest.axsparse,
    )
    if computed != manifest:
        odd = [key for key, value in computed if value != getattr(manifest, key)]
        raise DataError(
            f"{path}: its manifest contradicts itself at {odd[0]!r}; get the ticket anew"
        )
    return manifest


def hash_of(data: bytes | memoryview) -> str:
    """The BLAKE2b-128 hash in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _hash_of_json(value: object) -> str:
    return hash_of(json.dumps(value).encode())


def _sparsity(kept: int, numel: int) -> float:
    return 1 - kept / numel if numel else 0.0


# -- the file ---------------------------------------------------------------------------


class Ticket:
    """An open ticket, which reads one mask at a time; it implements `Masks`."""

    def __init__(self, path: Path, manifest: TicketManifest, file: SafetensorsFile) -> None:
        self.path = path
        self.manifest = manifest
        self.kept: Mapping[str, int] = {name: e.kept for name, e in manifest.tensors.items()}
        """How many entries of every pruned tensor are kept, by global name in model order."""
        self._file = file

    def mask(
        self,
        name: str,
        shape: Shape | None = None,
        weight: Weight | None = None,
        within: Tensor | None = None,
    ) -> Tensor:
        """The flat bool mask of one pruned tensor, True where an entry is kept.

        `shape` and `within` must fit the ticket; `weight` is part of the protocol and is never
        called. The file is read and checked again: raises KeyError for a tensor that is not
        pruned, DataError if the file has changed since it was opened, and MissingInputError if it
        is gone.
        """
        entry = self.manifest.tensors[name]
        assert shape is None or shape == entry.shape, f"{name}: check() comes first"
        del weight
        mask = Bits(self._packed(name).numpy(), entry.numel).mask()
        assert within is None or int(mask[within].sum()) == entry.kept, f"{name} is pruned already"
        return mask

    def check(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Refuse the ticket unless it is of a model with these parameters.

        `shapes` has the shapes of all parameters by name. Raises ConfigError with the first name
        or shape that differs.
        """
        there = self.manifest.parameters
        mend = "make the model's settings those, or draw a ticket from this model"
        for name in (*shapes, *(name for name in there if name not in shapes)):
            shape = tuple(shapes.get(name, ()))
            if name not in there:
                differs = f"which has no parameter {name} {shape}"
            elif name not in shapes:
                differs = f"which has a parameter {name} {there[name]} that this one lacks"
            elif there[name] != shape:
                differs = f"in which {name} has shape {there[name]} and not {shape}"
            else:
                continue
            raise ConfigError(f"{self.path}: drawn from another model, {differs}; {mend}")

    def verify(self) -> None:
        """Read all masks, one at a time; DataError if one is damaged."""
        for name in self.kept:
            self._packed(name)

    def _packed(self, name: str) -> Tensor:
        """The packed bits of a tensor as they are in the file, checked."""
        entry = self.manifest.tensors[name]
        with _reading(self.path):
            packed = self._file.read(name)
        wrong = _damage(packed, entry)
        if wrong:
            raise DataError(
                f"{self.path}: damaged: the mask of {name} {wrong}; get the ticket anew"
            )
        return packed


def open_ticket(path: str | Path) -> Ticket:
    """Open a ticket, after reading and checking all of it.

    Raises MissingInputError if it cannot be read, DataError if it is no ticket or is damaged.
    """
    path = Path(path)
    with _reading(path):
        if path.exists() and not path.is_file():
            raise OSError(0, "not a regular file")
        file = SafetensorsFile(path)
    manifest = read_manifest(path, file.metadata)
    _check_tensors(file, manifest)
    ticket = Ticket(path, manifest, file)
    ticket.verify()
    return ticket


def packed_header(entry: Entry) -> TensorHeader:
    """The type and shape of a tensor's packed bits in the file."""
    return TensorHeader(torch.uint8, (-(-entry.numel // 8),))


def pack(mask_D: Tensor) -> Tensor:
    """The packed bits of a flat bool mask, as they are in a ticket."""
    assert mask_D.dtype == torch.bool and mask_D.dim() == 1
    return torch.from_numpy(np.packbits(mask_D.numpy()))


def count_kept(packed: Tensor) -> int:
    """How many entries a packed mask keeps."""
    return sum(
        int(np.unpackbits(part.numpy()).sum(dtype=np.int64)) for part in packed.split(_PIECE)
    )


def _damage(packed: Tensor, entry: Entry) -> str:
    """What is wrong with a packed mask, in words; empty if nothing is."""
    if hash_of(packed.numpy().data) != entry.hash:
        return "has another hash than the manifest says"
    if entry.numel % 8 and int(packed[-1]) & (0xFF >> entry.numel % 8):
        return "has bits behind its last entry"
    kept = count_kept(packed)
    return f"keeps {kept} entries and not {entry.kept}" if kept != entry.kept else ""


def _check_tensors(file: SafetensorsFile, manifest: TicketManifest) -> None:
    """DataError unless the file has exactly the tensors that the manifest names.

    This comes first, since their sizes are trusted afterwards.
    """
    there = {name: file.described(name) for name in file.shapes}
    headers = {name: packed_header(entry) for name, entry in manifest.tensors.items()}
    for name in sorted(there.keys() ^ headers.keys()):
        raise DataError(
            f"{file.path}: {name!r} is in its manifest or among its masks, but not in both; get "
            "the ticket anew"
        )
    for name, header in there.items():
        if header != headers[name]:
            raise DataError(
                f"{file.path}: the mask of {name} is a tensor of shape {header.shape}, which does "
                f"not fit its {manifest.tensors[name].numel} entries; get the ticket anew"
            )


def _reading(path: Path) -> AbstractContextManager[None]:
    return reading(f"ticket {str(path)!r}:", "name a file that pruning wrote")
