"""What the files of a layer contain, and which replica writes them.

    mask/NAME      uint8, one bit an entry as in tickets; of pruned tensors only
    master/NAME    fp32 weights of the kept entries, in ascending position
    MOMENT/NAME    the same for each state of the optimizer, such as exp_avg
    value/NAME     a parameter that is not trained, in the training precision
    buffer/NAME    a buffer that is part of the model's state, of the first replica, in its own
                   type; complex32 and complex128, which the format lacks, as pairs of reals

NAME is the global name of the parameter; a tied weight is saved under the name of its first
use. Half-precision weights are not saved: they are the rounded masters (`samo/precision.py`).
What the pruning method needs is in a second file, as KIND/NAME.

The contents do not depend on the layout, nor on how indices, masters and shards are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from axsparse.models.module_buffers import BufferSlot, slots
from axsparse.pruning.methods.masking import MaskingState
from axsparse.pruning.ticket.ticket_reader import pack
from axsparse.runtime.files.safetensors import SUFFIX, TensorHeader, as_stored, header_of
from axsparse.samo.index.base import host_positions
from axsparse.samo.layer_construction import BuiltLayer
from axsparse.samo.layer_state import LayerState
from axsparse.samo.tensor_state import TensorState
from axsparse.training.checkpoint.manifest import LayerEntry, ParameterEntry

MASK, MASTER, VALUE, BUFFER = "mask", "master", "value", "buffer"
"""The kinds of tensors; the names of the optimizer's moments are kinds too."""


@dataclass(frozen=True)
class TensorCopy:
    """A tensor that is to be written."""

    header: TensorHeader
    value: Callable[[], Tensor]
    """Returns the present contents; they may be a view of memory that training changes."""
    is_gathered: bool = False
    """Whether all replicas of the stage must ask for the value together."""
    is_fixed: bool = False
    """Whether training never changes the value, so that it can be read while training goes on."""


@dataclass(frozen=True)
class LayerContents:
    """What the files of one layer contain."""

    name: str
    files: Mapping[str, Mapping[str, TensorCopy]]
    """By file name and by name in the file; the file of the pruning method comes second."""
    entry: LayerEntry

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.header.nbytes for file in self.files.values() for tensor in file.values())


def contents_of(
    number: int, layer: BuiltLayer, ties: Mapping[str, str], masking: MaskingState | None
) -> LayerContents:
    """What is saved of the layer that has this number in the model, counted from 0."""
    state = layer.state
    own: dict[str, TensorCopy] = {}
    parameters: dict[str, ParameterEntry] = {}
    trained = {tensor.name: tensor for tensor in state.owned}
    for local, parameter in layer.module.named_parameters():
        name = f"{layer.spec.name}.{local}"
        if name in ties:
            continue
        kept = parameter.numel()
        if name in trained:
            kept = trained[name].kept
            own.update(_trained_tensor(state, trained[name]))
        else:
            own[f"{VALUE}/{name}"] = _plain_tensor(parameter.detach())
        parameters[name] = ParameterEntry(shape=tuple(parameter.shape), kept=kept)
    for slot in slots(layer.module):
        if slot.persists:
            # The slot is read when the value is asked for: it has the first replica's tensor then.
            own[f"{BUFFER}/{layer.spec.name}.{slot.name}"] = TensorCopy(
                header_of(slot.tensor), partial(_buffer_value, slot)
            )
    of_method = {
        f"{kind}/{name}": replace(_plain_tensor(tensor), is_fixed=True)
        for kind, tensors in (masking.tensors if masking is not None else {}).items()
        for name, tensor in tensors.items()
        if name in trained and name not in ties
    }
    stem = f"{number:04}-{layer.spec.name[:80]}"
    files = {f"{stem}{SUFFIX}": own}
    if of_method:
        files[f"{stem}.masking{SUFFIX}"] = of_method
    return LayerContents(
        layer.spec.name,
        files,
        LayerEntry(
            file=f"{stem}{SUFFIX}",
            masking=f"{stem}.masking{SUFFIX}" if of_method else None,
            parameters=parameters,
        ),
    )


def _trained_tensor(state: LayerState, tensor: TensorState) -> Iterator[tuple[str, TensorCopy]]:
    """The mask, master and moments of a trained tensor, each by its name in the file."""
    name, numel, kept = tensor.name, tensor.parameter.numel(), tensor.kept
    index = tensor.index
    if kept < numel:

        def packed() -> Tensor:
            mask_D = torch.zeros(numel, dtype=torch.bool)
            # The thread that writes asks for the mask while the device computes.
            mask_D[host_positions(index)] = True
            return pack(mask_D)

        header = TensorHeader(torch.uint8, (-(-numel // 8),))
        yield f"{MASK}/{name}", TensorCopy(header, packed, is_fixed=True)
    values, is_sharded = TensorHeader(torch.float32, (kept,)), state.shares.is_sharded
    yield f"{MASTER}/{name}", TensorCopy(values, lambda: state.master(name), is_sharded)

    def moment(kind: str) -> Callable[[], Tensor]:
        return lambda: state.moment(name, kind)

    for kind in state.optimizer_state.moments_K:
        yield f"{kind}/{name}", TensorCopy(values, moment(kind), is_sharded)


def _plain_tensor(tensor: Tensor) -> TensorCopy:
    return TensorCopy(TensorHeader(tensor.dtype, tuple(tensor.shape)), lambda: tensor.cpu())


def _buffer_value(slot: BufferSlot) -> Tensor:
    return as_stored(slot.tensor).cpu()


def deal(sizes: Sequence[int], writers: int) -> list[int]:
    """The number of the writer of each file, such that all write about as many bytes."""
    loads = [0] * writers
    dealt = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        dealt[number] = loads.index(min(loads))
        loads[dealt[number]] += sizes[number]
    return dealt
