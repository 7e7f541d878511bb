"""Reads the files of a checkpoint into the state of one rank, whatever the layout.

A rank opens only the files of its own layers. It reads the masters of all their kept entries,
since its dense weights follow from those, but only the moments that it holds itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from axsparse.models.module_buffers import slots
from axsparse.runtime.canonical_form import canonical
from axsparse.runtime.errors import DataError, MissingInputError
from axsparse.runtime.files.safetensors import SafetensorsFile, TensorHeader, as_read, header_of
from axsparse.samo.layer_construction import BuiltLayer
from axsparse.samo.layer_state import LayerState
from axsparse.samo.masks import Shape, Weight
from axsparse.samo.selection import Bits
from axsparse.samo.tensor_state import TensorState
from axsparse.training.checkpoint.layer_files import BUFFER, MASK, MASTER, VALUE
from axsparse.training.checkpoint.verification import Checkpoint

PIECE = 1 << 20
"""Number of kept entries that are read at a time."""


class CheckpointMasks:
    """The masks of a checkpoint, with which its state is built again; implements `Masks`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._files = CheckpointFiles(checkpoint)
        self.kept: Mapping[str, int] = checkpoint.manifest.pruned

    def mask(self, name: str, shape: Shape, weight: Weight, within: Tensor | None = None) -> Tensor:
        """The flat mask of a pruned tensor; `weight` is not needed for it."""
        del weight
        assert within is None, "state is built with these masks"
        numel = torch.Size(shape).numel()
        wanted = TensorHeader(torch.uint8, (-(-numel // 8),))
        packed = self._files.of(name).read(f"{MASK}/{name}", wanted)
        mask_D = Bits(packed.numpy(), numel).mask()
        kept = int(mask_D.count_nonzero())  # sum() would first make an int64 of each entry
        if kept != self.kept[name]:
            raise DataError(
                f"checkpoint {self._files.checkpoint.path}: the mask of {name} keeps {kept} "
                f"entries, its manifest says {self.kept[name]}; resume from another one"
            )
        return mask_D


def load_layers(
    checkpoint: Checkpoint, layers: Iterable[BuiltLayer], ties: Mapping[str, str]
) -> None:
    """Fill layers that were built with the masks of the checkpoint with its values.

    The model must have the checkpoint's shapes.
    """
    files = CheckpointFiles(checkpoint)
    for layer in layers:
        trained = {tensor.name: tensor for tensor in layer.state.tensors}
        for local, parameter in layer.module.named_parameters():
            name = f"{layer.spec.name}.{local}"
            saved = ties.get(name, name)
            if name not in trained:
                wanted = TensorHeader(parameter.dtype, tuple(parameter.shape))
                parameter.detach().copy_(files.of(saved).read(f"{VALUE}/{saved}", wanted))
            elif trained[name].alias_of is None:
                _load_tensor(files.of(saved), saved, layer.state, trained[name])
        for slot in slots(layer.module):
            if slot.persists:
                key = f"{BUFFER}/{layer.spec.name}.{slot.name}"
                stored = files.of_layer(layer.spec.name).read(key, header_of(slot.tensor))
                read = as_read(stored, slot.tensor.dtype)
                slot.put(canonical(read.to(slot.tensor.device)))


def _load_tensor(file: LayerFile, saved: str, state: LayerState, tensor: TensorState) -> None:
    """Read the masters, which also sets the dense weight, and the moments that this rank holds."""
    optimizer_state = state.optimizer_state
    wanted = TensorHeader(torch.float32, (tensor.kept,))
    master = file.entries(f"{MASTER}/{saved}", wanted)
    for start in range(0, tensor.kept, PIECE):
        stop = min(start + PIECE, tensor.kept)
        values_K = master(start, stop).to(state.backend.device)
        optimizer_state.write_master(tensor, start, values_K)
    for kind in optimizer_state.moments_K:
        values = file.entries(f"{kind}/{saved}", wanted)
        for start, stop in state.shares.blocks(tensor, state.shares.held):
            optimizer_state.moments_of(tensor, start, stop)[kind].copy_(values(start, stop))


class LayerFile:
    """One file, whose tensors are read only if they are as expected."""

    def __init__(self, folder: Path, name: str) -> None:
        """MissingInputError if it cannot be opened, DataError if it is no safetensors file."""
        self._where = f"checkpoint {folder}: {name}"
        try:
            self._file = SafetensorsFile(folder / name)
        except OSError as reason:
            raise MissingInputError(
                f"{self._where} cannot be opened ({reason.strerror}); resume from another one"
            ) from reason

    @property
    def headers(self) -> Mapping[str, TensorHeader]:
        """The headers of all tensors of the file."""
        return {key: self._file.described(key) for key in self._file.shapes}

    def read(self, key: str, wanted: TensorHeader | None = None) -> Tensor:
        """A whole tensor; DataError if it is missing, or its header is not the wanted one."""
        self._check(key, wanted)
        return self._file.read(key)

    def entries(self, key: str, wanted: TensorHeader) -> Callable[[int, int], Tensor]:
        """A function that reads the entries [start, stop) of a flat tensor; DataError as `read`."""
        self._check(key, wanted)
        return partial(self._file.read_part, key)

    def _check(self, key: str, wanted: TensorHeader | None) -> None:
        if key not in self._file.shapes:
            raise DataError(f"{self._where} lacks {key!r}; resume from another one")
        found = self._file.described(key)
        if wanted is not None and found != wanted:
            raise DataError(
                f"{self._where}: {key!r} is {_shown(found)}, this run has {_shown(wanted)}; resume "
                "from another one"
            )


class CheckpointFiles:
    """The files of layers of a checkpoint; the one that was read last stays open."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._layer_of = {
            name: layer
            for layer, entry in checkpoint.manifest.layers.items()
            for name in entry.parameters
        }
        self._open: tuple[str, LayerFile] | None = None

    def of(self, name: str) -> LayerFile:
        """The file of the layer that has this parameter."""
        return self.of_layer(self._layer_of[name])

    def of_layer(self, layer: str) -> LayerFile:
        """The file of a layer."""
        return self._named(self.checkpoint.manifest.layers[layer].file)

    def read_masking(self, kind: str, name: str) -> Tensor:
        """A tensor that the pruning method saved of a parameter; DataError if there is none."""
        masking = self.checkpoint.manifest.layers[self._layer_of[name]].masking
        if masking is None:
            raise DataError(
                f"checkpoint {self.checkpoint.path}: has nothing for the pruning of {name}; resume "
                "from another one"
            )
        return self._named(masking).read(f"{kind}/{name}")

    def _named(self, name: str) -> LayerFile:
        if self._open is None or self._open[0] != name:
            self._open = (name, LayerFile(self.checkpoint.path, name))
        return self._open[1]


def _shown(header: TensorHeader) -> str:
    return f"{str(header.dtype).removeprefix('torch.')} {header.shape}"
