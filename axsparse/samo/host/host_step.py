"""The whole optimizer step of tensors on a CPU, in one pass over gradients and state.

Compiled loops read each kept entry's gradient, master and moments once, and write masters, moments
and rounded weights, with the bits of the torch operations of `samo/optim/adamw.py` and
`samo/optim/sgd.py`. `samo/cuda/step_kernel.py` is the same for GPUs.

torch takes square roots from MKL where it has that library, and on some processors MKL's are often
one unit off the rounded value (docs/decisions/033-one-pass-on-cpus.md). Of fp32 weights AdamW's
loop therefore calls the same function, or takes the processor's instruction where torch has its
bits; of weights in half precision it always takes the instruction.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axsparse.samo.index.numba_loops import FEW
from axsparse.samo.index.pieces import Array
from axsparse.samo.optim.hyper import Hyper
from axsparse.samo.optim.tensor_slot import TensorSlot

CHUNK = 65_536
"""Kept entries that are updated at a time where they are gathered, scattered or converted."""


@cache
def machine_code() -> Any:
    """The module of compiled loops; None if numba is missing or does not fit this numpy."""
    try:
        return importlib.import_module("axsparse.samo.host.machine_code")
    except ImportError:
        return None


def sum_of_squares(values: Tensor) -> float:
    """The sum of a flat tensor's squares in fp64, on a CPU: in one pass where there is a loop for
    its type that is worth compiling."""
    if values.numel() <= FEW or values.dtype == torch.float16 or machine_code() is None:
        return float(values.double().square_().sum())
    return float(machine_code().sum_of_squares(_array(values)))


@cache
def root_address() -> int:
    """How loops take the square roots that torch takes: the address of MKL's function, or 0 for the
    processor's instruction, where that has torch's bits or nothing has."""
    values = torch.rand(4099, generator=torch.Generator().manual_seed(0)).pow_(9)
    values[::7] = 0
    roots, wanted = np.empty(values.numel(), dtype=np.float32), values.sqrt().numpy()
    for address in (0, _library_root()):
        machine_code().take_roots(values.numpy(), roots, address)
        if np.array_equal(roots, wanted):
            return address
    return 0


def _library_root() -> int:
    """The address of the function of MKL that torch calls, 0 if torch shows none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        return ctypes.cast(library.vmsSqrt, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


def adamw_loop(slots: Sequence[TensorSlot], hyper: Hyper, gradient_factor: float) -> None:
    """One step of AdamW, as `adamw_step` of `samo/cuda/step_kernel.py`."""
    step, factor = machine_code().adamw_step, np.float32(gradient_factor)
    factors = tuple(map(np.float32, hyper.adamw_factors()))
    for slot in slots:
        slot.check(("exp_avg", "exp_avg_sq"))
        address = root_address() if slot.master_kind == "weight" else 0
        for chunk in _chunks(slot):
            step(chunk.gradient, factor, chunk.moments, *chunk.weights, factors, address)


def sgd_loop(
    slots: Sequence[TensorSlot],
    hyper: Hyper,
    gradient_factor: float,
    *,
    momentum: float,
    nesterov: bool,
) -> None:
    """One step of SGD, as `sgd_step` of `samo/cuda/step_kernel.py`."""
    step, factor = machine_code().sgd_step, np.float32(gradient_factor)
    scalars = (hyper.weight_decay, momentum, -hyper.learning_rate, float(nesterov))
    factors = tuple(map(np.float32, scalars))
    for slot in slots:
        slot.check(("momentum",) if momentum else ())
        for chunk in _chunks(slot):
            moment = chunk.moments[0] if momentum else None
            step(chunk.gradient, factor, moment, *chunk.weights, factors)


@dataclass(frozen=True)
class _Chunk:
    """Kept entries of one tensor as loops take them; all are arrays of one length."""

    gradient: Array
    """fp32, or the bits of bf16."""
    moments: tuple[Array, ...]
    weights: tuple[Array | None, Array | None, Array | None]
    """What the loop replaces: fp32 masters (None where they are joined of weight and remainder),
    the bits of bf16 weights (None for other types), and the remainders, if there are any."""


def _chunks(slot: TensorSlot) -> Iterator[_Chunk]:
    """The chunks of a tensor's held entries; what the caller has changed in each is stored before
    the next one."""
    index, held, kind = slot.index, slot.held, slot.master_kind
    is_dense = index.kept == slot.weight.numel()
    gradients = None if slot.gradient.dtype == torch.float16 else _array(slot.gradient)
    moments = [values.numpy() for values in slot.moments]
    stored = None if slot.master is None else slot.master.numpy()
    # What needs no memory of its own is one chunk.
    each = CHUNK if not is_dense or gradients is None else max(len(held), 1)
    for start in range(held.start, held.stop, each):
        stop = min(start + each, held.stop)
        own = slice(start - held.start, stop - held.start)
        if is_dense:
            weight_K = slot.weight[start:stop]
        elif kind == "fp32":
            weight_K = slot.weight.new_empty(stop - start)
        else:
            weight_K = index.gather(slot.weight, start, stop)
        masters = _array(weight_K) if stored is None else stored[own]
        yield _Chunk(
            slot.gradient[start:stop].float().numpy()
            if gradients is None
            else gradients[start:stop],
            tuple(values[own] for values in moments),
            (
                None if kind == "remainder" else masters,
                _array(weight_K) if weight_K.dtype == torch.bfloat16 else None,
                masters if kind == "remainder" else None,
            ),
        )
        if weight_K.dtype == torch.float16:
            assert slot.master is not None
            weight_K.copy_(slot.master[own])
        if not is_dense:
            index.scatter(slot.weight, weight_K, start)


def _array(values: Tensor) -> Array:
    """An fp32 tensor as an array of numbers, a bf16 one as an array of bits."""
    array: Array = (values.view(torch.uint16) if values.itemsize == 2 else values).numpy()
    return array
