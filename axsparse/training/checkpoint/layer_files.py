"""What a layer's files contain, and who writes them.

    mask/NAME      uint8, a bit an entry as in tickets; of pruned tensors only
    master/NAME    fp32, kept entries in ascending position
    MOMENT/NAME    the same, of each state of the optimizer
    value/NAME     untrained parameters, in the training precision
    buffer/NAME    buffers that are part of the model's state, the first replica's

NAME is the global parameter name; a tied weight is saved under that of its first use. There
are no half-precision weights: they are their masters, rounded (`samo/precision.py`). A second
file has what the pruning method needs, by kind and name.

Nothing here depends on the layout, nor on how indices, masters and shards are stored.
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
from axsparse.runtime.files.safetensors import SUFFIX, TensorHeader
from axsparse.samo.cuda.device_index import DeviceIndex
from axsparse.samo.layer_construction import BuiltLayer
from axsparse.samo.layer_state import LayerState
from axsparse.samo.tensor_state import TensorState
from axsparse.training.checkpoint.manifest import LayerEntry, ParameterEntry

MASK, MASTER, VALUE, BUFFER = "mask", "master", "value", "buffer"
"""Kinds of tensors, beside the names of moments."""


@dataclass(frozen=True)
class TensorCopy:
    """A tensor that is to be written."""

    described: TensorHeader
    value: Callable[[], Tensor]
    """Its contents of now; may be a view of what training changes."""
    is_gathered: bool = False
    """Whether all replicas of the stage ask for the value together."""
    is_fixed: bool = False
    """Whether training replaces and never changes it, so that it can be asked for later."""


@dataclass(frozen=True)
class LayerContents:
    """The files of one layer."""

    name: str
    files: Mapping[str, Mapping[str, TensorCopy]]
    """By file name and name in the file; a layer's own file comes first."""
    entry: LayerEntry

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(
            saved.described.nbytes for file in self.files.values() for saved in file.values()
        )


def contents_of(
    number: int, layer: BuiltLayer, ties: Mapping[str, str], masking: MaskingState | None
) -> LayerContents:
    """What is saved of a layer, which has this number in the model."""
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
            own.update(_tensor(state, trained[name]))
        else:
            own[f"{VALUE}/{name}"] = _saved(parameter.detach())
        parameters[name] = ParameterEntry(shape=tuple(parameter.shape), kept=kept)
    for slot in slots(layer.module):
        if slot.persists:
            described = TensorHeader(slot.tensor.dtype, tuple(slot.tensor.shape))
            # Asked for later: the first replica's are put there before.
            own[f"{BUFFER}/{layer.spec.name}.{slot.name}"] = TensorCopy(
                described, partial(_now, slot)
            )
    of_method = {
        f"{kind}/{name}": replace(_saved(tensor), is_fixed=True)
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


def _tensor(state: LayerState, tensor: TensorState) -> Iterator[tuple[str, TensorCopy]]:
    """Mask, master and moments of a trained tensor."""
    name, numel, kept = tensor.name, tensor.parameter.numel(), tensor.kept
    index = tensor.index
    if kept < numel:

        def packed() -> Tensor:
            mask_D = torch.zeros(numel, dtype=torch.bool)
            # Asked for by the thread that writes, while the device computes.
            if isinstance(index, DeviceIndex):
                mask_D[index.positions_by_host()] = True
            else:
                mask_D[index.positions()] = True
            return pack(mask_D)

        described = TensorHeader(torch.uint8, (-(-numel // 8),))
        yield f"{MASK}/{name}", TensorCopy(described, packed, is_fixed=True)
    values = TensorHeader(torch.float32, (kept,))
    yield f"{MASTER}/{name}", TensorCopy(values, lambda: state.master(name), state.is_sharded)

    def moment(kind: str) -> Callable[[], Tensor]:
        return lambda: state.moment(name, kind)

    for kind in state.moments_K:
        yield f"{kind}/{name}", TensorCopy(values, moment(kind), state.is_sharded)


def _saved(tensor: Tensor) -> TensorCopy:
    return TensorCopy(TensorHeader(tensor.dtype, tuple(tensor.shape)), lambda: tensor.cpu())


def _now(slot: BufferSlot) -> Tensor:
    return slot.tensor.cpu()


def deal(sizes: Sequence[int], writers: int) -> list[int]:
    """Which of the writers takes each file, such that they have about as many bytes each."""
    loads = [0] * writers
    dealt = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        dealt[number] = loads.index(min(loads))
        loads[dealt[number]] += sizes[number]
    return dealt
