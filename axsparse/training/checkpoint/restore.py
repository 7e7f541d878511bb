"""From the files of a checkpoint into the state of one rank, whatever its layout.

A rank opens the files of its own layers only, reads the masters of all their kept entries,
since its dense weights follow from those, and of the moments what it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from axsparse.models.module_buffers import slots
from axsparse.runtime.errors import DataError, MissingInputError
from axsparse.runtime.files.safetensors import SafetensorsFile, TensorHeader
from axsparse.samo.layer_construction import BuiltLayer
from axsparse.samo.layer_state import LayerState
from axsparse.samo.masks import Shape, Weight
from axsparse.samo.tensor_state import TensorState
from axsparse.training.checkpoint.layer_files import BUFFER, MASK, MASTER, VALUE
from axsparse.training.checkpoint.verification import Checkpoint

PIECE = 1 << 20
"""Kept entries that are read at a time."""


class CheckpointMasks:
    """The masks of a checkpoint, for building state that is pruned as it was; `Masks`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._files = Files(checkpoint)
        self.kept: Mapping[str, int] = checkpoint.manifest.pruned

    def mask(self, name: str, shape: Shape, weight: Weight, within: Tensor | None = None) -> Tensor:
        """The flat mask of a pruned tensor; `weight` is never called."""
        del weight
        assert within is None, "state is built with these masks"
        numel = torch.Size(shape).numel()
        wanted = TensorHeader(torch.uint8, (-(-numel // 8),))
        packed = self._files.of(name).read(f"{MASK}/{name}", wanted)
        bits = np.unpackbits(packed.numpy(), count=numel)
        mask_D = torch.from_numpy(bits.view(np.bool_))
        kept = int(mask_D.count_nonzero())  # sum() would make 8 bytes of each bit
        if kept != self.kept[name]:
            raise DataError(
                f"checkpoint {self._files.checkpoint.path}: the mask of {name} keeps {kept} "
                f"entries, its manifest says {self.kept[name]}; resume from another one"
            )
        return mask_D


def load_layers(
    checkpoint: Checkpoint, layers: Iterable[BuiltLayer], ties: Mapping[str, str]
) -> None:
    """Fill state that was built with the masks of the checkpoint, for a model of its shapes."""
    files = Files(checkpoint)
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
                wanted = TensorHeader(slot.tensor.dtype, tuple(slot.tensor.shape))
                key = f"{BUFFER}/{layer.spec.name}.{slot.name}"
                saved_tensor = files.of_layer(layer.spec.name).read(key, wanted)
                slot.put(saved_tensor.to(slot.tensor.device))


def _load_tensor(file: LayerFile, saved: str, state: LayerState, tensor: TensorState) -> None:
    """Masters, and with them the dense weight; moments of what is held here."""
    wanted = TensorHeader(torch.float32, (tensor.kept,))
    master = file.entries(f"{MASTER}/{saved}", wanted)
    for start in range(0, tensor.kept, PIECE):
        stop = min(start + PIECE, tensor.kept)
        state.write_master(tensor, start, master(start, stop).to(state.backend.device))
    for kind in state.moments_K:
        values = file.entries(f"{kind}/{saved}", wanted)
        for start, stop in state.blocks(tensor, state.held):
            state.moments_of(tensor, start, stop)[kind].copy_(values(start, stop))


class LayerFile:
    """One file, whose tensors are read as they are expected or not at all."""

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
    def described(self) -> Mapping[str, TensorHeader]:
        """All tensors of the file."""
        return {key: self._file.described(key) for key in self._file.shapes}

    def read(self, key: str, wanted: TensorHeader | None = None) -> Tensor:
        """A whole tensor; DataError if it is not there, or not as wanted."""
        self._check(key, wanted)
        return self._file.read(key)

    def entries(self, key: str, wanted: TensorHeader) -> Callable[[int, int], Tensor]:
        """What reads the entries [start, stop) of a flat tensor."""
        self._check(key, wanted)
        return partial(self._file.read_part, key)

    def _check(self, key: str, wanted: TensorHeader | None) -> None:
        if key not in self._file.shapes:
            raise DataError(f"{self._where} lacks {key!r}; resume from another one")
        found = self._file.described(key)
        if wanted is not None and found != wanted:
            raise DataError(
                f"{self._where}: {key!r} is {_told(found)}, this run has {_told(wanted)}; resume "
                "from another one"
            )


class Files:
    """The files of a checkpoint, the last one of which stays open."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self._layer_of = {
            name: layer
            for layer, entry in checkpoint.manifest.layers.items()
            for name in entry.parameters
        }
        self._open: tuple[str, LayerFile] | None = None

    def of(self, name: str) -> LayerFile:
        """The file of a parameter's layer."""
        return self.of_layer(self._layer_of[name])

    def of_layer(self, layer: str) -> LayerFile:
        """The file of a layer."""
        return self._named(self.checkpoint.manifest.layers[layer].file)

    def read_masking(self, kind: str, name: str) -> Tensor:
        """What the pruning method saved of a parameter; DataError if it did not."""
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


def _told(described: TensorHeader) -> str:
    return f"{str(described.dtype).removeprefix('torch.')} {described.shape}"
