"""The machine that kernels run on, the state of one tensor, and how promises are written down."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, TypeAlias

import numpy as np
import torch
from support import kernel_reference as reference
from torch import Tensor, nn

from axsparse.samo.cuda import kernels
from axsparse.samo.cuda.device_index import DeviceIndex, DeviceKind, make_device_index
from axsparse.samo.cuda.launch import TILE, Launcher
from axsparse.samo.index.base import make_index
from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.optimizer import Hyper, Optimizer, TensorSlot
from axsparse.samo.optim.sgd import sgd
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import MASK_BLOCK, Encoding, IndexKind, StateFormat
from axsparse.samo.tensor_state import TensorState

GUARD = 256
"""Bytes before and after what kernels may write; a multiple of what vectors want aligned."""
CANARY = 0x5A
HYPER = Hyper(step=1, learning_rate=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
FACTOR = 0.37
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ENCODED: tuple[Encoding, ...] = ("int32", "mask")
Types: TypeAlias = tuple[torch.dtype, torch.dtype]
"""The types of weight and gradient."""
STATES: tuple[Types, ...] = ((BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32))
SIZES = [1, 31, MASK_BLOCK + 1, TILE - 1, TILE, TILE + 1, BLOCK, BLOCK + 77]
DENSITIES = [0.001, 0.1, 0.9]


@dataclass
class Machine:
    """Where kernels run, and guarded memory there."""

    launch: Launcher
    device: torch.device
    _guarded: list[Tensor] = field(default_factory=list)

    def put(self, values: Tensor, shift: int = 0) -> Tensor:
        """A copy between guards, `shift` entries off an aligned address."""
        before = GUARD + shift * values.itemsize
        end = before + values.nbytes
        room = torch.full((end + GUARD,), CANARY, dtype=torch.uint8)
        room[before:end] = values.contiguous().view(-1).view(torch.uint8)
        room = room.to(self.device)
        self._guarded += [room[:before], room[end:]]
        return room[:end].view(values.dtype)[before // values.itemsize :]

    def check(self) -> None:
        """Nothing was written outside the tensors that were put here."""
        assert all(bool((guard == CANARY).all()) for guard in self._guarded)

    def index(self, mask: Tensor, kind: DeviceKind) -> DeviceIndex:
        if kind == "full":
            assert mask.all()
            return DeviceIndex(self.launch, kind, mask.numel(), mask.numel(), self.device)
        index = make_device_index(self.launch, mask.to(self.device), kind)
        assert index.kind == kind, "a mask that keeps everything has no encoding"
        return index


Promise: TypeAlias = Callable[[Machine], None]
PROMISES: dict[str, Promise] = {}
"""Filled by `kernel_contract.py`."""


def promise(*axes: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a promise to the contract, for every combination of values."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for values in product(*axes):
            name = "-".join([function.__name__, *map(_named, values)])
            PROMISES[name] = partial(_keep, function, values)
        return function

    return add


def _keep(function: Callable[..., None], values: Sequence[Any], machine: Machine) -> None:
    function(machine, *values)
    machine.check()


def _named(value: object) -> str:
    if isinstance(value, tuple):
        return "-".join(map(_named, value))
    return str(getattr(value, "name", value)).removeprefix("torch.")


def random_mask(numel: int, density: float) -> Tensor:
    """Neither all nor nothing where that can be."""
    mask = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < density
    if numel > 1:
        mask[numel // 2], mask[numel // 3] = True, False
    return mask


def mask_for(kind: DeviceKind, numel: int, density: float) -> Tensor:
    """Of an encoding that can hold it."""
    if kind == "full":
        return torch.ones(numel, dtype=torch.bool)
    return random_mask(numel, density)


def randoms(numel: int, seed: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(ours: Tensor, theirs: Tensor) -> None:
    """NaN is like NaN, and a zero's sign counts."""
    ours = ours.cpu()
    assert ours.dtype == theirs.dtype
    both = {2: torch.int16, 4: torch.int32, 8: torch.int64}[ours.itemsize]
    if ours.is_floating_point():
        assert torch.equal(ours.isnan(), theirs.isnan())
        ours, theirs = (
            ours.nan_to_num(7, math.inf, -math.inf),
            theirs.nan_to_num(7, math.inf, -math.inf),
        )
    assert torch.equal(ours.view(both), theirs.view(both))


# -- the state of one tensor ----------------------------------------------------------------


def layer_of(
    mask: Tensor,
    weight: torch.dtype,
    gradient: torch.dtype,
    moments: int = 0,
    kind: IndexKind | None = None,
) -> tuple[LayerState, TensorState]:
    """The state of one tensor of zeros on the CPU, by the types of weight and gradient."""
    index = make_index(mask, kind or "int32")
    zeros = nn.Parameter(torch.zeros(mask.numel(), dtype=weight))
    tensor = TensorState("w", zeros, index, decays=True)
    names = (("momentum",), ("exp_avg", "exp_avg_sq"))[moments - 1] if moments else ()
    layer = LayerState("l", [tensor], StateFormat(weight, gradient, names))
    return layer, tensor


@dataclass(frozen=True)
class Case:
    """An update rule: in numpy, and as the package has it."""

    name: str
    numpy: reference.Rule
    torch: Optimizer

    @property
    def moments(self) -> int:
        return len(self.torch.moments)

    def device(self, slots: Sequence[TensorSlot], hyper: Hyper, factor: float) -> None:
        """One step by kernels."""
        kernels.step(self.torch, slots, hyper, factor)


def _sgd(name: str, momentum: float, *, nesterov: bool = False) -> Case:
    rule = reference.sgd(momentum, nesterov=nesterov)
    return Case(name, rule, sgd(momentum, nesterov=nesterov))


RULES = (
    Case("adamw", reference.adamw, ADAMW),
    _sgd("sgd", 0.0),
    _sgd("momentum", 0.9),
    _sgd("nesterov", 0.9, nesterov=True),
)
ADAMW_CASE, SGD_CASE, MOMENTUM_CASE, _ = RULES


def slot_of(machine: Machine, index: DeviceIndex, layer: LayerState, shift: int = 0) -> TensorSlot:
    """A copy of a layer's one tensor and its state."""
    [tensor] = layer.tensors
    return TensorSlot(
        index,
        machine.put(tensor.weight_D, shift),
        machine.put(layer.gradient),
        None
        if layer.optimizer_state.master_K is None
        else machine.put(layer.optimizer_state.master_K),
        tuple(machine.put(values) for values in layer.optimizer_state.moments_K.values()),
        range(index.kept),
    )


def empty_partials(machine: Machine, kept: int) -> Tensor:
    """Memory for the sums of squares of so many entries, with values that nobody may leave
    there."""
    return machine.put(torch.full((-(-kept // BLOCK),), -1.0, dtype=torch.float64))


def by_numpy(layer: LayerState, case: Case, hyper: Hyper, factor: float) -> None:
    """One step of a layer's one tensor by the reference."""
    [tensor] = layer.tensors
    gradient = layer.gradient.float().numpy() * np.float32(factor)
    master = layer.optimizer_state.read_master(tensor, 0, tensor.kept).numpy().copy()
    moments = [values.numpy() for values in layer.optimizer_state.moments_K.values()]
    moved = case.numpy(master, gradient, moments, hyper)
    layer.optimizer_state.write_master(tensor, 0, torch.from_numpy(moved))


def same_state(slot: TensorSlot, layer: LayerState) -> None:
    [tensor] = layer.tensors
    same_bits(slot.weight, tensor.weight_D)
    if layer.optimizer_state.master_K is not None:
        assert slot.master is not None
        same_bits(slot.master, layer.optimizer_state.master_K)
    for ours, theirs in zip(slot.moments, layer.optimizer_state.moments_K.values(), strict=True):
        same_bits(ours, theirs)


def fresh_layer(mask: Tensor, state: Types, moments: int) -> LayerState:
    """Random gradients, and masters that no half number holds, from which weights are rounded."""
    layer, tensor = layer_of(mask, *state, moments)
    layer.optimizer_state.write_master(tensor, 0, randoms(tensor.kept, 1))
    layer.gradient.copy_(randoms(tensor.kept, 5))
    return layer
