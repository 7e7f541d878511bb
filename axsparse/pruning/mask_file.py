"""Mask files: which entries of which parameters are kept, for a start under any layout.

A mask file is a safetensors file that has, by the global name of the parameter (a tied weight by
its first use), one of two forms:

- bits, as runs and checkpoints write them: a flat uint8 tensor of one bit an entry (1: kept), the
  first entry in the highest bit of the first byte. The metadata say what they are of:
  {"masks": {name: {"shape": [sizes], "kept": entries}}}, as JSON;
- bool, in the shape of the parameter, as `safetensors.torch.save_file` writes masks.

Parameters without a mask stay dense.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from axsparse.models.model_profile import ModelProfile
from axsparse.runtime.communication import Op, Transport, wait
from axsparse.runtime.errors import ConfigError, DataError, OutputError, reading, writing
from axsparse.runtime.exchange import gather_values, together
from axsparse.runtime.files.atomic import new_path
from axsparse.runtime.files.paths import expanded, kind_of, reject_foreign
from axsparse.runtime.files.safetensors import SafetensorsFile, TensorHeader, write_safetensors
from axsparse.runtime.grid import RankCoords
from axsparse.samo.masks import Shape, Weight
from axsparse.samo.selection import pack, unpack

MASK_FILE = "mask.safetensors"
"""The file in the run directory with the masks that the pruning method has found."""
MASKS = "masks"
MASK_MARK = f'{{"format": "pt", "{MASKS}": '
"""How the metadata of files begin that this module has written."""
ANEW = "get the file anew"
Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class MaskEntry:
    """The shape of one parameter, and how many of its entries are kept."""

    shape: Annotated[tuple[Count, ...], Field(max_length=64)]
    kept: Count

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


_ENTRIES = TypeAdapter(dict[str, MaskEntry])


class MaskFile:
    """An open mask file, which reads one mask at a time; it implements `Masks`."""

    def __init__(self, file: SafetensorsFile) -> None:
        """DataError where the file has other things than masks."""
        self.path = file.path
        self.entries = _entries(file)
        """By global name, in the order of the file."""
        self.kept: Mapping[str, int] = {name: it.kept for name, it in self.entries.items()}
        self._file = file

    def mask(
        self, name: str, shape: Shape, weight: Weight | None = None, within: Tensor | None = None
    ) -> Tensor:
        """The flat mask of a parameter; DataError if the file has changed or is damaged."""
        del weight  # a part of the protocol
        entry = self.entries[name]
        assert shape == entry.shape, f"{name}: targets() comes first"
        assert within is None, "state is built with these masks"
        with _reading(self.path):
            stored = self._file.read(name)
        is_bool = stored.dtype == torch.bool
        mask = stored.view(-1) if is_bool else unpack(stored, entry.numel)
        kept = int(mask.count_nonzero())
        if kept != entry.kept:
            raise DataError(
                f"{self.path}: damaged: the mask of {name!r} keeps {kept} entries and not "
                f"{entry.kept}; {ANEW}"
            )
        return mask

    def targets(self, profiled: ModelProfile) -> dict[str, Shape]:
        """The shapes of the masked parameters, in model order; ConfigError for the first mask that
        fits no trained matrix of the model."""
        matrices = {
            parameter.name: tuple(parameter.shape)
            for layer in profiled.layers
            for parameter in layer.parameters
            if parameter.trained and len(parameter.shape) >= 2
        }
        for name, entry in self.entries.items():
            first, shape = profiled.ties.get(name), matrices.get(name)
            if first is not None:
                wrong = f"which is tied to {first}; name it {first}"
            elif shape is None:
                wrong = "which is no trained matrix of this model; take the model of the masks"
            elif shape != entry.shape:
                wrong = f"of shape {entry.shape}, which has {shape}; take the model of the masks"
            else:
                continue
            raise ConfigError(f"{self.path}: has a mask of {name!r}, {wrong}")
        return {name: shape for name, shape in matrices.items() if name in self.entries}


def open_masks(path: str | Path) -> MaskFile:
    """Open a mask file, or the mask file of a run directory.

    Raises MissingInputError if it cannot be read, DataError if it holds no masks.
    """
    path = Path(expanded(path))
    if kind_of(f"{path}:", path) == "folder":
        path /= MASK_FILE
    with _reading(path):
        return MaskFile(SafetensorsFile(path))


def _entries(file: SafetensorsFile) -> dict[str, MaskEntry]:
    """The masks of the file. For bits the metadata describe them; bools are counted."""
    text = file.metadata.get(MASKS, "{}")
    try:
        said = _ENTRIES.validate_json(text)
    except ValidationError as reason:
        first = reason.errors(include_url=False, include_input=False)[0]
        raise DataError(
            f"{file.path}: its metadata {MASKS!r} are malformed ({first['type']}); {ANEW}"
        ) from reason
    entries = {}
    for name in file.shapes:
        header, entry = file.header(name), said.get(name)
        if header.dtype == torch.bool:
            entries[name] = MaskEntry(header.shape, int(file.read(name).count_nonzero()))
        elif entry is None or header != packed_header(entry.numel) or entry.kept > entry.numel:
            kind = str(header.dtype).removeprefix("torch.")
            raise DataError(
                f"{file.path}: {name!r} is {kind} {header.shape}, which is no mask; write it as "
                "bool, in the shape of the parameter"
            )
        else:
            entries[name] = entry
    if not entries or said.keys() - entries.keys():
        missing = f"the mask of {min(said.keys() - entries.keys())!r}" if said else "any mask"
        raise DataError(f"{file.path}: lacks {missing}; {ANEW}")
    return entries


def packed_header(numel: int) -> TensorHeader:
    """The type and shape of a mask's bits in a file."""
    return TensorHeader(torch.uint8, (-(-numel // 8),))


def _reading(path: Path) -> AbstractContextManager[None]:
    return reading(f"mask file {str(path)!r}:", "name a mask file, or a run that has found a mask")


# -- writing --------------------------------------------------------------------------------


def write_masks(
    path: str | Path,
    shapes: Mapping[str, Shape],
    masks: Mapping[str, Callable[[], Tensor]],
    *,
    transport: Transport,
    coords: RankCoords,
) -> None:
    """Write the masks of all stages to one file; all ranks call this together, between steps.

    `shapes` has the pruned parameters of the model, in model order. `masks` has functions that give
    the flat masks of the parameters on this rank's stage, which replica 0 calls, twice each. Rank 0
    writes the file, one mask at a time: the same under every layout, and completely or not at all.
    Raises OutputError on all ranks alike if it cannot be written, or a file is there that
    axsparse has not written.
    """
    path = Path(expanded(path)).absolute()
    here = masks if coords.replica == 0 else {}
    own = {name: int(mask().count_nonzero()) for name, mask in here.items()}
    owners: dict[str, int] = {}
    kept: dict[str, int] = {}
    for rank, counts in enumerate(gather_values(transport, own if coords.tp_rank == 0 else {})):
        for name, count in counts.items():
            assert name not in owners, f"{name} is on ranks {owners[name]} and {rank}"
            owners[name], kept[name] = rank, count
    entries = {name: MaskEntry(shape, kept[name]) for name, shape in shapes.items() if name in kept}

    def check() -> None:
        if transport.rank == 0:
            with _writing(path):
                reject_foreign("mask file", path, MASK_MARK)

    def write() -> None:
        bits = _bits(entries, here, owners, transport)
        if transport.rank != 0:
            deque(bits, maxlen=0)
            return
        headers = {name: packed_header(entry.numel) for name, entry in entries.items()}
        metadata = {MASKS: _ENTRIES.dump_json(entries).decode()}
        try:
            with _writing(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                with new_path(path) as unfinished:
                    write_safetensors(unfinished, headers, bits, metadata)
        except OutputError:
            deque(bits, maxlen=0)  # takes part in the other ranks' exchanges to the end
            raise

    together(transport, check)
    together(transport, write)


def _writing(path: Path) -> AbstractContextManager[None]:
    return writing(f"mask file {str(path)!r}:", "choose another place, or free the disk")


def _bits(
    entries: Mapping[str, MaskEntry],
    here: Mapping[str, Callable[[], Tensor]],
    owners: Mapping[str, int],
    transport: Transport,
) -> Iterator[Tensor]:
    """The packed masks in model order; on rank 0 only, since the other ranks just send theirs."""
    for name, entry in entries.items():
        owner, (size,) = owners[name], packed_header(entry.numel).shape
        packed = pack(here[name]()) if name in here else torch.empty(size, dtype=torch.uint8)
        if owner != 0 and size:
            bounds = [0] * (owner + 1) + [size] * (transport.size - owner)
            wait(transport.world.start(Op.ALL_GATHER, packed, bounds), transport.backoff)
        yield packed
        del packed
