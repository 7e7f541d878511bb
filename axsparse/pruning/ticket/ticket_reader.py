"""Reads tickets: files of masks, with which a run may start under any layout.

A ticket is a safetensors file. For every pruned tensor, under its global name, it has a uint8
tensor with one bit an entry (1: kept), in the tensor's flat order. The first entry is the highest
bit of the first byte, and the last byte is filled up with zeros. `ticket_manifest.py` describes
the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from axsparse.pruning.mask_distance import BITS
from axsparse.pruning.ticket.ticket_manifest import Entry, TicketManifest, hash_of, read_manifest
from axsparse.runtime.errors import ConfigError, DataError, reading
from axsparse.runtime.files.safetensors import SafetensorsFile, TensorHeader
from axsparse.samo.masks import Shape, Weight
from axsparse.samo.selection import Bits

_PIECE = 1 << 20
"""How many packed bytes are counted at a time."""
_MEND = "make the model's settings those, or draw a ticket from this model"


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
        for name, shape in shapes.items():
            if name not in there:
                raise ConfigError(
                    f"{self.path}: drawn from another model, which has no parameter {name} "
                    f"{tuple(shape)}; {_MEND}"
                )
            if there[name] != tuple(shape):
                raise ConfigError(
                    f"{self.path}: drawn from another model, in which {name} has shape "
                    f"{there[name]} and not {tuple(shape)}; {_MEND}"
                )
        for name, shape in there.items():
            if name not in shapes:
                raise ConfigError(
                    f"{self.path}: drawn from another model, which has a parameter {name} {shape} "
                    f"that this one lacks; {_MEND}"
                )

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
    return sum(int(BITS[piece.numpy()].sum(dtype=np.int64)) for piece in packed.split(_PIECE))


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
    for name in sorted(file.shapes.keys() ^ manifest.tensors.keys()):
        raise DataError(
            f"{file.path}: {name!r} is in its manifest or among its masks, but not in both; get "
            "the ticket anew"
        )
    for name, entry in manifest.tensors.items():
        if file.described(name) != packed_header(entry):
            raise DataError(
                f"{file.path}: the mask of {name} is a tensor of shape {file.shapes[name]}, which "
                f"does not fit its {entry.numel} entries; get the ticket anew"
            )


def _reading(path: Path) -> AbstractContextManager[None]:
    return reading(f"ticket {str(path)!r}:", "name a file that pruning wrote")
