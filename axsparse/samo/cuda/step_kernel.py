"""The whole optimizer step of a layer's tensors, in one kernel for those of the same types.

The kernel unscales and clips the gradient, applies the recurrence in fp32 to kept entries (as in
`samo/optim/adamw.py` and `samo/optim/sgd.py`), rounds the masters, and writes the dense weight in
whole tiles, with zeros at pruned positions. It needs no temporary.

Every operation and its rounding is that of the functions on a CPU with fused multiply-add, so
results have the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from axsparse.samo.cuda.device_index import INDICES, DeviceIndex
from axsparse.samo.cuda.launch import GROUP, NUMBERS, TENSORS, TILE, blocks_of, pointer
from axsparse.samo.optim.hyper import Hyper
from axsparse.samo.optim.tensor_slot import TensorSlot
from axsparse.samo.state_bytes import MasterKind

MASTERS: dict[MasterKind, str] = {
    "weight": "MasterIsWeight",
    "fp32": "MasterBuffer",
    "remainder": "MasterRemainder",
}
"""The names of the master kinds in the source."""


def _types(slot: TensorSlot) -> str:
    """The template arguments of the kernel for a tensor."""
    weight, gradient = NUMBERS[slot.weight.dtype], NUMBERS[slot.gradient.dtype]
    return f"{INDICES[_index(slot).kind]}, {weight}, {gradient}, {MASTERS[slot.master_kind]}"


def _index(slot: TensorSlot) -> DeviceIndex:
    index = slot.index.on_device
    assert index is not None, "kernels run where the index is on their device"
    return index


def _packed(slot: TensorSlot, block: int) -> tuple[int, ...]:
    """The fields of a TENSOR whose first thread block has number `block`."""
    index, moments = _index(slot), (*slot.moments, None, None)
    return (
        slot.weight.data_ptr(),
        pointer(index.entries),
        pointer(index.offsets),
        index.kept,
        index.numel,
        slot.gradient.data_ptr(),
        pointer(slot.master),
        pointer(moments[0]),
        pointer(moments[1]),
        slot.held.start,
        slot.held.stop,
        block,
    )


def _step(
    slots: Sequence[TensorSlot], kernel: str, moments: tuple[str, ...], scalars: Sequence[float]
) -> None:
    """Start a thread block for each tile of each tensor, up to GROUP tensors at a time."""
    alike: dict[str, list[TensorSlot]] = {}
    for slot in slots:
        slot.check(moments)
        alike.setdefault(_types(slot), []).append(slot)
    # Computed in fp64 and rounded, as torch does.
    factors = [np.float32(scalar) for scalar in scalars]
    for types, those in alike.items():
        for first in range(0, len(those), GROUP):
            tensors, blocks = [], 0
            for slot in those[first : first + GROUP]:
                tensors.append(_packed(slot, blocks))
                blocks += blocks_of(slot.weight.numel(), TILE)
            group = np.zeros(1, TENSORS)
            group["tensors"][0, : len(tensors)] = tensors
            group["number"] = len(tensors)
            _index(those[0]).launch(kernel.format(types=types), blocks, group, *factors)


def adamw_step(slots: Sequence[TensorSlot], hyper: Hyper, gradient_factor: float) -> None:
    """One step of AdamW; the moments are `exp_avg` and `exp_avg_sq`.

    `gradient_factor` multiplies every gradient entry (clipping, loss scale).
    """
    scalars = [gradient_factor, *hyper.adamw_factors()]
    _step(slots, "step_adamw<{types}>", ("exp_avg", "exp_avg_sq"), scalars)


def sgd_step(
    slots: Sequence[TensorSlot],
    hyper: Hyper,
    gradient_factor: float,
    *,
    momentum: float,
    nesterov: bool,
) -> None:
    """One step of SGD, whose only moment is `momentum`, or none if that is 0; otherwise as
    `adamw_step`."""
    kind = ("NESTEROV" if nesterov else "PLAIN") if momentum else "NONE"
    scalars = [gradient_factor, hyper.weight_decay, momentum, -hyper.learning_rate]
    _step(slots, f"step_sgd<{{types}}, {kind}>", ("momentum",) if momentum else (), scalars)
