"""The files of a layer: their contents, which replica writes them, and how they are read back.

    mask/NAME      uint8, one bit an entry as in mask files; of pruned tensors only, also where
                   they are no longer trained
    master/NAME    fp32 weights of the kept entries, in ascending position
    MOMENT/NAME    the same for each state of the optimizer, such as exp_avg
    begun/NAME     int64, updates before the first one of a parameter that was thawed at a resume
    value/NAME     a parameter that is not trained, in the precision that it was given in
    buffer/NAME    a buffer that is part of the model's state, of the first replica, in its own
                   type

NAME is the global name of the parameter; a tied weight is saved under the name of its first use.
Half-precision weights are not saved: they are the rounded masters (`samo/precision.py`). The state
of the pruning method is in a second file, as KIND/NAME.

The contents do not depend on the layout, nor on how indices, masters and shards are stored. A rank
opens only the files of its layers. It reads the masters of all their kept entries, from which its
dense weights follow, but only the moments of its shard.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from axsparse.models.layer import StartValues
from axsparse.models.model_profile import ModelProfile
from axsparse.models.module_buffers import slots
from axsparse.models.start_weights import some_of
from axsparse.pruning.mask_file import packed_header
from axsparse.pruning.methods.pruner import PrunerState
from axsparse.runtime.canonical_form import canonical
from axsparse.runtime.errors import AxsparseError, DataError, one_line, reading
from axsparse.runtime.files.safetensors import SUFFIX, SafetensorsFile, TensorHeader, header_of
from axsparse.runtime.process import write_line
from axsparse.samo.index.base import host_positions
from axsparse.samo.layer_construction import BuiltLayer, fill, given_value
from axsparse.samo.layer_state import LayerState
from axsparse.samo.masks import Shape, Weight
from axsparse.samo.precision import round_to
from axsparse.samo.selection import pack, unpack
from axsparse.samo.tensor_state import TensorState
from axsparse.training.checkpoint.checkpoint_folder import LayerEntry, ParameterEntry
from axsparse.training.checkpoint.verification import Checkpoint

MASK, MASTER, VALUE, BUFFER, BEGUN = "mask", "master", "value", "buffer", "begun"


@dataclass(frozen=True)
class TensorCopy:
    """A tensor that is to be written."""

    header: TensorHeader
    value: Callable[[], Tensor]
    """Returns the present contents; they may be a view of memory that training changes."""
    is_gathered: bool = False
    """Whether all replicas of the stage must ask for the value together."""
    is_shard: bool = False
    """Whether all tensor-parallel ranks of the stage must ask for the value together."""
    is_fixed: bool = False
    """Whether training never changes the value, so that it can be read while training continues."""


@dataclass(frozen=True)
class LayerContents:
    """The contents of the files of one layer."""

    name: str
    files: Mapping[str, Mapping[str, TensorCopy]]
    """By file name and by name in the file; the file of the pruning method comes second."""
    entry: LayerEntry

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.header.nbytes for file in self.files.values() for tensor in file.values())


def contents_of(
    number: int,
    layer: BuiltLayer,
    ties: Mapping[str, str],
    pruner: PrunerState,
    start: StartValues | None,
) -> LayerContents:
    """The saved contents of the layer that has this number in the model, counted from 0; `start`
    is the model's."""
    state = layer.state
    of_layer: dict[str, TensorCopy] = {}
    parameters: dict[str, ParameterEntry] = {}
    trained = state.by_full_name
    for local, parameter in layer.module.named_parameters():
        name = layer.spec.full_name(local)
        if name in ties:
            continue
        if name in trained:
            shape, kept = trained[name].full_shape, trained[name].full_kept
            of_layer.update(_trained_tensor(state, trained[name]))
        else:
            shape, kept = tuple(parameter.shape), parameter.numel()
            value = _frozen_value(start, name, parameter.detach())
            of_layer[f"{VALUE}/{name}"] = _plain_tensor(value)
            if (mask := layer.frozen_masks.get(name)) is not None:
                of_layer[f"{MASK}/{name}"] = _plain_tensor(mask)
                kept = int(unpack(mask, kept).count_nonzero())
        parameters[name] = ParameterEntry(shape=shape, kept=kept)
    for slot in slots(layer.module):
        if slot.persists:
            # The slot is read when the value is asked for: it has the first replica's tensor then.
            now = partial(lambda slot: slot.tensor.cpu(), slot)
            full = layer.spec.full_name(slot.name)
            of_layer[f"{BUFFER}/{full}"] = TensorCopy(header_of(slot.tensor), now)
    of_method = {
        f"{kind}/{name}": replace(_plain_tensor(tensor), is_fixed=True)
        for kind, tensors in pruner.tensors.items()
        for name, tensor in tensors.items()
        if name in trained and name not in ties
    }
    stem = f"{number:04}-{layer.spec.name[:80]}"
    file, pruner_file = f"{stem}{SUFFIX}", f"{stem}.pruner{SUFFIX}"
    files = {file: of_layer, **({pruner_file: of_method} if of_method else {})}
    entry = LayerEntry(file=file, pruner=pruner_file if of_method else None, parameters=parameters)
    return LayerContents(layer.spec.name, files, entry)


def _frozen_value(start: StartValues | None, name: str, held: Tensor) -> Tensor:
    """A frozen parameter's value as it was given; as it is held where that cannot be read any more,
    since a checkpoint is worth more than a few digits."""
    try:
        return given_value(start, name, held)
    except (OSError, AxsparseError) as reason:
        _warn_once(
            "warning: frozen parameters are saved in "
            f"{str(held.dtype).removeprefix('torch.')}, since their start values cannot be read "
            f"any more ({one_line(reason)})"
        )
        return held


@cache
def _warn_once(text: str) -> None:
    write_line(text)


def _trained_tensor(state: LayerState, tensor: TensorState) -> Iterator[tuple[str, TensorCopy]]:
    """The mask, master and moments of a trained tensor, each by its name in the file."""
    name, numel, kept = tensor.full_name, tensor.full_numel, tensor.full_kept
    is_shard = tensor.shard is not None
    if kept < numel:
        index = tensor.index

        def packed() -> Tensor:
            mask_D = torch.zeros(numel, dtype=torch.bool)
            # The thread that writes asks for the mask while the device computes.
            mask_D[host_positions(index)] = True
            return pack(mask_D)

        key, header = f"{MASK}/{name}", packed_header(numel)
        if is_shard:
            yield key, TensorCopy(header, lambda: pack(state.mask(name)), is_shard=True)
        else:
            yield key, TensorCopy(header, packed, is_fixed=True)
    values = partial(
        TensorCopy,
        TensorHeader(torch.float32, (kept,)),
        is_gathered=state.shares.is_sharded,
        is_shard=is_shard,
    )
    yield f"{MASTER}/{name}", values(lambda: state.master(name))
    for kind in state.optimizer_state.moments_K:
        yield f"{kind}/{name}", values(partial(state.moment, name, kind))
    if tensor.begun:
        yield f"{BEGUN}/{name}", _plain_tensor(torch.tensor([tensor.begun]))


def _plain_tensor(tensor: Tensor) -> TensorCopy:
    return TensorCopy(header_of(tensor), lambda: tensor.cpu())


def deal(sizes: Sequence[int], writers: int) -> list[int]:
    """The number of the writer of each file, such that all write about as many bytes."""
    loads = [0] * writers
    dealt = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        dealt[number] = loads.index(min(loads))
        loads[dealt[number]] += sizes[number]
    return dealt


PIECE = 1 << 20


def load_layers(
    checkpoint: Checkpoint, layers: Iterable[BuiltLayer], ties: Mapping[str, str]
) -> None:
    """Fill layers that were built with the masks of the checkpoint with its values.

    The model must have the checkpoint's shapes. A parameter that was frozen there and is trained
    here begins with fresh state; one that was trained there and is frozen here keeps its mask, and
    its value in the precision of the run.
    """
    files = CheckpointFiles(checkpoint)
    for layer in layers:
        aliases = {t.full_name for t in layer.state.tensors if t.alias_of is not None}
        for local, parameter in layer.module.named_parameters():
            name = layer.spec.full_name(local)
            saved = ties.get(name, name)
            tensor = layer.state.by_full_name.get(name)
            if tensor is not None and files.has(VALUE, saved):
                fill(layer.state, tensor, files.value(saved, tensor.full_shape).float())
                tensor.begun = checkpoint.manifest.progress.updates
            elif tensor is not None:
                _load_tensor(files, saved, layer.state, tensor)
                if files.has(BEGUN, saved):
                    tensor.begun = int(files.read(BEGUN, saved, TensorHeader(torch.int64, (1,))))
            elif name not in aliases:
                is_new = files.has(MASTER, saved)
                shape = tuple(parameter.shape)
                value = files.dense(MASTER, saved) if is_new else files.value(saved, shape)
                parameter.detach().copy_(value)
                if saved in files.kept:
                    header = packed_header(parameter.numel())
                    layer.frozen_masks[name] = files.read(MASK, saved, header)
        for slot in slots(layer.module):
            if slot.persists:
                name = layer.spec.full_name(slot.name)
                stored = files.buffer(layer.spec.name, name, header_of(slot.tensor))
                slot.put(canonical(stored.to(slot.tensor.device)))


def _load_tensor(
    files: CheckpointFiles, saved: str, state: LayerState, tensor: TensorState
) -> None:
    """Read the masters, which also sets the dense weight, and the moments that this rank holds."""
    optimizer_state = state.optimizer_state
    header = TensorHeader(torch.float32, (tensor.full_kept,))
    if tensor.shard is not None:
        _load_shard(files, saved, state, tensor)
        return
    master = files.entries(MASTER, saved, header)
    for start in range(0, tensor.kept, PIECE):
        stop = min(start + PIECE, tensor.kept)
        values_K = master(start, stop).to(state.backend.device)
        optimizer_state.write_master(tensor, start, values_K)
    for kind in optimizer_state.moments_K:
        values = files.entries(kind, saved, header, OWN_OPTIMIZER)
        for start, stop in state.shares.blocks(tensor, state.shares.held):
            optimizer_state.moments_of(tensor, start, stop)[kind].copy_(values(start, stop))


def _load_shard(files: CheckpointFiles, saved: str, state: LayerState, tensor: TensorState) -> None:
    """The part of `_load_tensor` for a shard: the full tensor is read."""
    fill(state, tensor, files.dense(MASTER, saved))
    for kind in state.optimizer_state.moments_K:
        dense_D = files.dense(kind, saved, suggestion=OWN_OPTIMIZER).view(-1)
        part_D = tensor.of_full(dense_D).to(state.backend.device)
        for start, stop in state.shares.blocks(tensor, state.shares.held):
            values_K = tensor.index.gather(part_D, start, stop)
            state.optimizer_state.moments_of(tensor, start, stop)[kind].copy_(values_K)


def thawed_and_frozen(checkpoint: Checkpoint, profile: ModelProfile) -> list[str]:
    """A line for the user for the parameters that are trained, or no longer trained, from here
    on."""
    files = CheckpointFiles(checkpoint)
    thawed, frozen = list[str](), list[str]()
    for layer in profile.layers:
        for each in layer.parameters:
            if each.name not in profile.ties and files.has(VALUE, each.name) is each.trained:
                (thawed if each.trained else frozen).append(each.name)
    lines = {
        "trained from here on, with fresh optimizer state": thawed,
        "no longer trained, and kept in the precision of the run": frozen,
    }
    return [f"{what}: {some_of(names)}" for what, names in lines.items() if names]


ANOTHER = "take another one"
OWN_OPTIMIZER = "go on with the optimizer that it has"


class CheckpointFiles:
    """The files of layers of a checkpoint, with the masks that its state is built with again
    (`Masks`); the file that was read last stays open.

    Its methods raise MissingInputError for a file that cannot be read, DataError for a file that is
    no safetensors file, and for a tensor that is missing or has another header.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.kept: Mapping[str, int] = checkpoint.manifest.pruned
        layers = checkpoint.manifest.layers.values()
        self._layer_of = {name: layer for layer in layers for name in layer.parameters}
        self._file: SafetensorsFile | None = None

    def headers(self, layer: str) -> dict[str, TensorHeader]:
        """The headers of all tensors in the file of a layer, by KIND/NAME."""
        file = self._opened(self.checkpoint.manifest.layers[layer].file)
        return {key: file.header(key) for key in file.shapes}

    def has(self, kind: str, name: str) -> bool:
        """Whether there is such a tensor of a parameter."""
        return f"{kind}/{name}" in self._opened(self._layer_of[name].file).shapes

    def mask(
        self, name: str, shape: Shape, weight: Weight | None = None, within: Tensor | None = None
    ) -> Tensor:
        """The flat mask of a pruned tensor; `weight` is not needed for it."""
        del weight
        assert within is None, "state is built with these masks"
        numel = math.prod(shape)
        return unpack(self.read(MASK, name, packed_header(numel)), numel)

    def dense(
        self, kind: str, name: str, dtype: torch.dtype = torch.float32, *, suggestion: str = ANOTHER
    ) -> Tensor:
        """The masters or moments of a parameter in its shape, rounded to `dtype`, with zeros at
        pruned positions; `suggestion` ends the error if there are none."""
        entry = self._layer_of[name].parameters[name]
        kept = entry.kept if name in self.kept else math.prod(entry.shape)
        header = TensorHeader(torch.float32, (kept,))
        values_K = round_to(self.entries(kind, name, header, suggestion)(0, kept), dtype)
        if name not in self.kept:
            return values_K.view(entry.shape)
        mask_D = self.mask(name, entry.shape)
        if int(mask_D.count_nonzero()) != entry.kept:
            raise DataError(
                f"checkpoint {self.checkpoint.path}: the mask of {name} keeps "
                f"{int(mask_D.count_nonzero())} entries, its manifest says {entry.kept}; {ANOTHER}"
            )
        dense_D = torch.zeros(mask_D.shape, dtype=dtype)
        return dense_D.masked_scatter_(mask_D, values_K).view(entry.shape)

    def read(self, kind: str, name: str, expected: TensorHeader) -> Tensor:
        """The saved tensor of a parameter."""
        return self._read(self._layer_of[name].file, f"{kind}/{name}", expected)

    def value(self, name: str, shape: Shape) -> Tensor:
        """A parameter that is not trained, in the type that it is saved in."""
        file, key = self._layer_of[name].file, f"{VALUE}/{name}"
        dtype = self._checked(file, key).header(key).dtype
        return self._read(file, key, TensorHeader(dtype, shape))

    def buffer(self, layer: str, name: str, expected: TensorHeader) -> Tensor:
        """A buffer of a layer."""
        file = self.checkpoint.manifest.layers[layer].file
        return self._read(file, f"{BUFFER}/{name}", expected)

    def entries(
        self, kind: str, name: str, expected: TensorHeader, suggestion: str = ANOTHER
    ) -> Callable[[int, int], Tensor]:
        """A function that reads the entries [start, stop) of a parameter's saved tensor;
        `suggestion` ends the error if there is none."""
        key, file = f"{kind}/{name}", self._layer_of[name].file
        opened = self._checked(file, key, expected, suggestion)

        def part(start: int, stop: int) -> Tensor:
            with self._reading(file):
                return opened.read_part(key, start, stop)

        return part

    def read_pruner(self, kind: str, name: str) -> Tensor:
        """A tensor that the pruning method saved of a parameter, or the flat value of a frozen one;
        DataError if there is none."""
        if self.has(VALUE, name):
            return self.value(name, self._layer_of[name].parameters[name].shape).float().view(-1)
        file = self._layer_of[name].pruner
        if file is None:
            raise DataError(
                f"checkpoint {self.checkpoint.path}: has nothing for the pruning of {name}; "
                f"{ANOTHER}"
            )
        return self._read(file, f"{kind}/{name}")

    def _read(self, name: str, key: str, expected: TensorHeader | None = None) -> Tensor:
        file = self._checked(name, key, expected)
        with self._reading(name):
            return file.read(key)

    def _reading(self, name: str) -> AbstractContextManager[None]:
        """The run that wrote the checkpoint may remove it meanwhile."""
        where = f"checkpoint {self.checkpoint.path}: {name}"
        return reading(where, "take another one, or one that its run keeps")

    def _opened(self, name: str) -> SafetensorsFile:
        if self._file is None or self._file.path.name != name:
            with self._reading(name):
                self._file = SafetensorsFile(self.checkpoint.path / name)
        return self._file

    def _checked(
        self, name: str, key: str, expected: TensorHeader | None = None, suggestion: str = ANOTHER
    ) -> SafetensorsFile:
        """The file of this name, which has this tensor."""
        file, where = self._opened(name), f"checkpoint {self.checkpoint.path}: {name}"
        if key not in file.shapes:
            raise DataError(f"{where} lacks {key!r}; {suggestion}")
        there = file.header(key)
        if expected is not None and there != expected:
            raise DataError(
                f"{where}: {key!r} is {_shown(there)}, this run has {_shown(expected)}; {ANOTHER}"
            )
        return file


def _shown(header: TensorHeader) -> str:
    return f"{str(header.dtype).removeprefix('torch.')} {header.shape}"
