"""The promises of kernels, as functions of the machine that they run on, and that machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from axsparse.samo import fixed_point, precision
from axsparse.samo.backend import Backend
from axsparse.samo.cuda import kernels
from axsparse.samo.cuda.device_index import INDICES, DeviceIndex, DeviceKind, make_device_index
from axsparse.samo.cuda.kernels import add_exact, compress, finish_exact, sum_squares
from axsparse.samo.cuda.launch import CHUNK, GROUP, SUMMED, THREADS, TILE, Argument, Launcher
from axsparse.samo.index.base import make_index
from axsparse.samo.layer_state import LayerState
from axsparse.samo.optim import update as update_module
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.optimizer import Hyper, Optimizer, TensorSlot
from axsparse.samo.optim.sgd import sgd
from axsparse.samo.optim.update import norm_partials, update
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import MASK_BLOCK, Encoding, IndexKind, StateFormat, index_bytes
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
CONTRACT: dict[str, Promise] = {}
"""Each promise for each case, by name."""


def promise(*axes: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a promise to the contract, for every combination of values."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for values in product(*axes):
            name = "-".join([function.__name__, *map(_named, values)])
            CONTRACT[name] = partial(_keep, function, values)
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
    """Neither all nor nothing where that can be; nothing of one entry."""
    mask = torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < density
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


def state_of(masks: Mapping[str, Tensor], stored: StateFormat, **given: Any) -> LayerState:
    """The state of tensors of zeros on the CPU, by their names, in the shapes of their masks."""
    tensors = [
        TensorState(
            name,
            nn.Parameter(torch.zeros(mask.shape, dtype=stored.weight)),
            make_index(mask.view(-1), stored.index),
            decays=True,
        )
        for name, mask in masks.items()
    ]
    return LayerState("layer", tensors, stored, **given)


def layer_of(
    mask: Tensor,
    weight: torch.dtype,
    gradient: torch.dtype,
    moments: int = 0,
    kind: IndexKind | None = None,
) -> tuple[LayerState, TensorState]:
    """The state of one tensor of zeros on the CPU, by the types of weight and gradient."""
    names = (("momentum",), ("exp_avg", "exp_avg_sq"))[moments - 1] if moments else ()
    layer = state_of({"w": mask}, StateFormat(weight, gradient, names, kind or "int32"))
    return layer, layer.tensors[0]


@dataclass(frozen=True)
class Case:
    """An update rule that has kernels and loops."""

    name: str
    optimizer: Optimizer

    @property
    def moments(self) -> int:
        return len(self.optimizer.moments)

    def device(self, slots: Sequence[TensorSlot], hyper: Hyper, factor: float) -> None:
        """One step by kernels."""
        kernels.step(self.optimizer, slots, hyper, factor)


RULES = (
    Case("adamw", ADAMW),
    Case("sgd", sgd(0.0, nesterov=False)),
    Case("momentum", sgd(0.9, nesterov=False)),
    Case("nesterov", sgd(0.9, nesterov=True)),
)
ADAMW_CASE, SGD_CASE, *_ = RULES


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


def partials_of(gradient_K: Tensor) -> Tensor:
    """Sums of squares a block, in the order of `source/compress.cuh`."""
    values = gradient_K.float().numpy().astype(np.float64)
    blocks = -(-values.size // BLOCK)
    padded = np.zeros(blocks * BLOCK)
    padded[: values.size] = values
    each = padded.reshape(blocks, BLOCK // CHUNK, CHUNK // THREADS, THREADS // 32, 32)
    # A loop, since `sum` adds in pairs.
    lanes = _in_order(np.moveaxis(each * each, 2, 0))
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    chunks = _in_order(np.moveaxis(lanes[..., 0], 2, 0))
    return torch.from_numpy(_in_order(np.moveaxis(chunks, 1, 0)))


def _in_order(terms: NDArray[Any]) -> NDArray[Any]:
    total: NDArray[Any] = terms[0].copy()
    for term in terms[1:]:
        total += term
    return total


def empty_partials(machine: Machine, kept: int) -> Tensor:
    """Memory for the sums of squares of so many entries, with values that nobody may leave
    there."""
    return machine.put(torch.full((-(-kept // BLOCK),), -1.0, dtype=torch.float64))


def by_loop(layer: LayerState, case: Case, hyper: Hyper, factor: float) -> None:
    """One step of a layer by the loops of CPUs, whatever its size; `test_host_step.py` compares
    them with torch."""
    with mock.patch.object(update_module, "FEW", -1):
        update([layer], case.optimizer, hyper, factor)


def same_state(slot: TensorSlot, layer: LayerState) -> None:
    [tensor] = layer.tensors
    same_bits(slot.weight, tensor.weight_D)
    same_masters_and_moments(slot, layer, slice(None))


def same_masters_and_moments(slot: TensorSlot, layer: LayerState, part: slice) -> None:
    """A slot has some of a layer's masters and moments."""
    ours = [values for values in (slot.master, *slot.moments) if values is not None]
    for own, theirs in zip(ours, layer.optimizer_state.stored().tensors, strict=True):
        same_bits(own, theirs[part])


def fresh_layer(mask: Tensor, state: Types, moments: int) -> LayerState:
    """Random gradients, and masters that no half number holds, from which weights are rounded."""
    layer, tensor = layer_of(mask, *state, moments)
    layer.optimizer_state.write_master(tensor, 0, randoms(tensor.kept, 1))
    layer.gradient.copy_(randoms(tensor.kept, 5))
    return layer


# -- indices --------------------------------------------------------------------------------


@promise(ENCODED, SIZES, DENSITIES)
def an_index_is_the_one_of_the_cpu(
    machine: Machine, kind: Encoding, numel: int, density: float
) -> None:
    mask = random_mask(numel, density)
    positions = mask.nonzero().view(-1)

    index = machine.index(mask, kind)

    assert (index.kept, index.numel) == (positions.numel(), numel)
    assert index.nbytes == index_bytes(numel, index.kept, kind)
    assert torch.equal(index.positions().cpu(), positions)
    assert torch.equal(index.positions(torch.device("cpu")), positions)
    assert index.entries is not None
    if kind == "int32":
        assert torch.equal(index.entries.cpu().long(), positions)
    else:
        packed = np.packbits(mask.numpy(), bitorder="little")
        assert index.entries[: packed.size].tolist() == packed.tolist()
        assert not index.entries[packed.size :].any()
    if index.offsets is not None:
        blocks = range(-(-numel // MASK_BLOCK) + 1)
        before = [int(mask[: at * MASK_BLOCK].sum()) for at in blocks]
        assert index.offsets.tolist() == before


@promise(ENCODED, (BF16, FP32))
def any_stretch_of_kept_entries_is_gathered_and_scattered(
    machine: Machine, kind: Encoding, dtype: torch.dtype
) -> None:
    mask = random_mask(BLOCK + 3000, 0.1)
    index, theirs = machine.index(mask, kind), make_index(mask, kind)
    dense = randoms(mask.numel(), 1, dtype)
    kept = index.kept
    for start, stop in [(0, kept), (0, 0), (kept, kept), (7, 8), (kept // 3, kept - 5)]:
        gathered = index.gather(machine.put(dense), start, stop)
        same_bits(gathered, theirs.gather(dense, start, stop))
        ours, expected = machine.put(dense), dense.clone()
        values = randoms(stop - start, 2, dtype)
        index.scatter(ours, machine.put(values), start)
        theirs.scatter(expected, values, start)
        same_bits(ours, expected)


@promise()
def a_mask_that_keeps_everything_costs_nothing(machine: Machine) -> None:
    mask = torch.ones(TILE + 5, dtype=torch.bool, device=machine.device)

    index = make_device_index(machine.launch, mask, "mask")

    values, dense = randoms(3, 1), machine.put(torch.zeros(TILE + 5))
    index.scatter(dense, values.to(machine.device), 4)
    assert (index.kind, index.kept, index.nbytes) == ("full", TILE + 5, 0)
    assert index.positions().tolist() == list(range(TILE + 5))
    same_bits(index.gather(dense, 4, 7), values)


@promise(ENCODED, [(0,), (TILE,), (BLOCK - 1,), (BLOCK,), (3 * BLOCK,)])
@promise(ENCODED, [(5, MASK_BLOCK - 1), (0, 3 * BLOCK), (9, 10, 2 * BLOCK)])
def a_few_kept_entries_are_found_among_empty_blocks(
    machine: Machine, kind: Encoding, places: tuple[int, ...]
) -> None:
    mask = torch.zeros(3 * BLOCK + 1, dtype=torch.bool)
    mask[list(places)] = True
    index = machine.index(mask, kind)
    gradient = machine.put(torch.zeros(len(places)))
    dense = randoms(mask.numel(), 1)

    compress(index, machine.put(dense), gradient, accumulate=False)

    assert index.positions().tolist() == list(places)
    same_bits(gradient, dense[mask])


# -- compression ----------------------------------------------------------------------------


@promise(tuple(INDICES), STATES, [1, CHUNK + 1, BLOCK + 77])
def gradients_are_compressed_and_added_as_on_the_cpu(
    machine: Machine, kind: DeviceKind, types: Types, numel: int
) -> None:
    weight, gradient = types
    mask = mask_for(kind, numel, 0.3)
    layer, tensor = layer_of(mask, weight, gradient)
    index = machine.index(mask, kind)
    ours = machine.put(torch.full((index.kept,), math.nan, dtype=gradient))

    for microbatch in range(3):
        dense = randoms(numel, microbatch, weight)
        layer.accumulate(tensor, dense)
        compress(index, machine.put(dense), ours, accumulate=microbatch > 0)
        same_bits(ours, layer.gradient)


@promise(tuple(INDICES), STATES, [1, TILE - 1, BLOCK + TILE + 5])
def weights_are_expanded_as_on_the_cpu(
    machine: Machine, kind: DeviceKind, types: Types, numel: int
) -> None:
    weight, stored = types
    mask = mask_for(kind, numel, 0.1)
    mask[TILE : 2 * TILE] &= kind == "full"  # a thread block that only writes zeros
    values = randoms(int(mask.sum()), 3, stored)
    values[:4] = torch.tensor([math.nan, math.inf, 1 + 2.0**-8, -7e4])[: values.numel()]
    if stored == FP32:
        values[:1].view(torch.int32).fill_(0x7FFFFFFF)  # a NaN that rounding would make a zero
    backend, expected = Backend(machine.device, machine.launch), torch.zeros(numel, dtype=weight)
    expected[mask] = precision.round_to(values, weight) if stored == FP32 else values
    for shift in (0, 1):
        ours = machine.put(torch.full((numel,), 5.0, dtype=weight), shift)

        backend.expand(machine.index(mask, kind), machine.put(values), ours)

        same_bits(ours, expected)


@promise(tuple(INDICES), (BF16, FP16, FP32), [1, CHUNK + 1, BLOCK + 77])
def exact_sums_are_those_of_the_cpu(
    machine: Machine, kind: DeviceKind, dtype: torch.dtype, numel: int
) -> None:
    mask = mask_for(kind, numel, 0.3)
    index, kept = machine.index(mask, kind), int(mask.sum())
    sums = torch.randint(-(2**61), 2**61, (kept,), generator=torch.Generator().manual_seed(1))
    ours, unit = machine.put(sums), 2.0**-24
    most = machine.put(torch.zeros(1))
    largest = 0.0
    for adds in (True, False, True):
        # Entries of many sizes, of which some lie halfway between two integers.
        dense = randoms(numel, 5 + adds) * torch.exp2(randoms(numel, 3) * 9 - 9)
        dense = dense.clamp(-(2.0**15), 2.0**15).to(dtype)
        fixed_point.add(sums, dense[mask], unit, torch.zeros(1), adds=adds)
        add_exact(index, machine.put(dense), ours, unit, most, accumulate=adds)
        largest = max(largest, float(dense[mask].abs().max()) if kept else 0.0)
        assert torch.equal(ours.cpu(), sums)
        assert most.item() == largest


@promise([math.inf, -math.inf, math.nan])
def the_largest_entry_tells_what_is_not_finite(machine: Machine, value: float) -> None:
    dense, most = torch.ones(CHUNK + 9), machine.put(torch.zeros(1))
    index = machine.index(torch.ones(CHUNK + 9, dtype=torch.bool), "full")
    sums = machine.put(torch.zeros(CHUNK + 9, dtype=torch.int64))
    for entry in (value, 2.0):
        dense[CHUNK + 1] = entry
        add_exact(index, machine.put(dense), sums, 0.5, most, accumulate=False)
        assert not math.isfinite(most.item()), "and stays so"


@promise([(0, 1), (0, 3 * CHUNK), (7, 40), (CHUNK // 2, BLOCK + 5), (BLOCK, 2 * BLOCK + 1)])
def gradients_are_made_in_the_memory_of_their_sums(machine: Machine, part: tuple[int, int]) -> None:
    """Gradients before them are made of the sums before them, and stay."""
    start, stop = part
    sums = torch.randint(-(2**61), 2**61, (stop,), generator=torch.Generator().manual_seed(2))
    sums >>= torch.arange(stop) % 60
    ours = machine.put(sums)
    for first, last, unit in ((0, start, 2.0**-60), (start, stop, 2.0**-170)):
        fixed_point.in_fp32(sums, slice(first, last), unit)
        finish_exact(machine.launch, ours, slice(first, last), unit)

    same_bits(ours.view(FP32)[:stop], sums.view(FP32)[:stop])


@promise((BF16, FP16, FP32), [0, 1, CHUNK - 1, BLOCK, BLOCK + CHUNK + 3])
def sums_of_squares_are_those_of_the_cpu_in_another_order(
    machine: Machine, dtype: torch.dtype, kept: int
) -> None:
    layer, _ = layer_of(torch.ones(kept, dtype=torch.bool), dtype, dtype)
    layer.gradient.copy_(randoms(kept, 1))
    partials = empty_partials(machine, kept)

    sum_squares(machine.launch, [(machine.put(layer.gradient), partials)])

    same_bits(partials, partials_of(layer.gradient))
    theirs = norm_partials([layer], ["w"])["w"]
    # 65,536 roundings of fp64, which the other order may do otherwise.
    torch.testing.assert_close(partials.cpu(), theirs, rtol=1e-11, atol=0)


@promise([math.inf, -math.inf, math.nan])
def a_gradient_that_is_not_finite_is_found(machine: Machine, value: float) -> None:
    gradient = randoms(2 * TILE + 9, 1, BF16)
    gradient[-1] = value
    partials = empty_partials(machine, gradient.numel())

    sum_squares(machine.launch, [(machine.put(gradient), partials)])

    assert not partials.isfinite().any()


@promise((BF16, FP32), [1, SUMMED + 3])
def squares_of_many_tensors_are_summed_by_few_launches(
    machine: Machine, dtype: torch.dtype, number: int
) -> None:
    sizes = [(1, 0, CHUNK, BLOCK + 5, CHUNK + 1, 31)[place % 6] for place in range(number)]
    gradients = [randoms(size, place, dtype) for place, size in enumerate(sizes)]
    parts = [(machine.put(values), empty_partials(machine, values.numel())) for values in gradients]
    launched: list[str] = []

    def counted(kernel: str, blocks: int, *arguments: Argument) -> None:
        launched.append(kernel)
        machine.launch(kernel, blocks, *arguments)

    sum_squares(counted, parts)

    for values, (_, partials) in zip(gradients, parts, strict=True):
        same_bits(partials, partials_of(values))
    filled = sum(size > 0 for size in sizes)
    assert len(launched) == 2 * -(-filled // SUMMED)


# -- the step ---------------------------------------------------------------------------------


# Reason: a rule, its state and its settings, most of which are the same in most promises.
def stepped(
    machine: Machine,
    rule: Case,
    layer: LayerState,
    mask: Tensor,
    kind: DeviceKind,
    *,
    hyper: Hyper = HYPER,
    factor: float = FACTOR,
    shift: int = 0,
) -> TensorSlot:
    """One step by kernels, which leaves the bits of loops."""
    slot = slot_of(machine, machine.index(mask, kind), layer, shift)
    rule.device([slot], hyper, factor)
    by_loop(layer, rule, hyper, factor)
    same_state(slot, layer)
    return slot


@promise(RULES, tuple(INDICES), STATES)
def a_step_is_the_formulas_with_one_rounding_an_operation(
    machine: Machine, rule: Case, kind: DeviceKind, state: Types
) -> None:
    mask = mask_for(kind, TILE + 1001, 0.2)
    layer = fresh_layer(mask, state, rule.moments)
    slot = slot_of(machine, machine.index(mask, kind), layer)

    for step in (1, 2, 3):
        gradient = randoms(slot.index.kept, step).pow_(3).to(state[1])
        layer.gradient.copy_(gradient)
        slot.gradient.copy_(gradient)
        hyper = replace(HYPER, step=step)
        rule.device([slot], hyper, FACTOR)
        by_loop(layer, rule, hyper, FACTOR)
        same_state(slot, layer)
    assert not slot.weight.cpu()[~mask].any()


@promise(tuple(INDICES), [1, 2, TILE, 3 * TILE, BLOCK + TILE + 5], [0.0005, 0.1, 0.95])
def tensors_of_any_size_and_density_are_stepped(
    machine: Machine, kind: DeviceKind, numel: int, density: float
) -> None:
    mask = mask_for(kind, numel, density)
    stepped(machine, ADAMW_CASE, fresh_layer(mask, (BF16, BF16), 2), mask, kind)


@promise(ENCODED, (STATES[0], STATES[1], STATES[-1]))
def a_share_of_the_entries_is_updated_and_the_others_keep_their_weights(
    machine: Machine, kind: Encoding, state: Types
) -> None:
    mask = random_mask(5 * TILE + 3, 0.2)
    layer = fresh_layer(mask, state, 2)
    [tensor] = layer.tensors
    before = tensor.weight_D.clone()
    index = machine.index(mask, kind)
    whole = slot_of(machine, index, layer)
    by_loop(layer, ADAMW_CASE, HYPER, FACTOR)
    for held in (range(0), range(1000, 2500), range(2500, index.kept)):
        weights = machine.put(before)
        part = slice(held.start, held.stop)
        slot = TensorSlot(
            index,
            weights,
            whole.gradient,
            None if whole.master is None else machine.put(whole.master[part].cpu()),
            tuple(machine.put(values[part].cpu()) for values in whole.moments),
            held,
        )

        ADAMW_CASE.device([slot], HYPER, FACTOR)

        expected = before.clone()
        places = tensor.index.positions()[part]
        expected[places] = tensor.weight_D[places]
        same_bits(slot.weight, expected)
        same_masters_and_moments(slot, layer, part)


@promise(RULES)
def tensors_of_the_same_types_are_stepped_together(machine: Machine, rule: Case) -> None:
    states = (STATES[1], STATES[2])
    kinds: tuple[DeviceKind, ...] = ("mask", "full")
    launched: list[str] = []

    def launch(kernel: str, blocks: int, *arguments: Argument) -> None:
        launched.append(kernel)
        machine.launch(kernel, blocks, *arguments)

    cases = []
    for number in range(14):
        numel = (1, TILE, 2 * TILE + 5, 77)[number % 4] + number
        mask = mask_for(kinds[number % 2], numel, 0.3)
        layer = fresh_layer(mask, states[number // 2 % 2], rule.moments)
        layer.gradient.copy_(randoms(layer.gradient.numel(), number))
        index = replace(machine.index(mask, kinds[number % 2]), launch=launch)
        cases.append((slot_of(machine, index, layer), layer))

    rule.device([slot for slot, _ in cases], HYPER, FACTOR)

    assert len(launched) == len(kinds) * len(states)
    for slot, layer in cases:
        by_loop(layer, rule, HYPER, FACTOR)
        same_state(slot, layer)


@promise()
def more_tensors_than_a_launch_takes_are_stepped_by_several(machine: Machine) -> None:
    mask = random_mask(99, 0.3)
    index = machine.index(mask, "mask")
    layers = [fresh_layer(mask, STATES[0], 2) for _ in range(2 * GROUP + 1)]
    for number, layer in enumerate(layers):
        layer.gradient.copy_(randoms(layer.gradient.numel(), number))
    slots = [slot_of(machine, index, layer) for layer in layers]

    ADAMW_CASE.device(slots, HYPER, FACTOR)

    for slot, layer in zip(slots, layers, strict=True):
        by_loop(layer, ADAMW_CASE, HYPER, FACTOR)
        same_state(slot, layer)


@promise((STATES[0], STATES[2], STATES[-1]), [1, 3])
def weights_need_not_stand_at_aligned_addresses(machine: Machine, state: Types, shift: int) -> None:
    mask = random_mask(TILE + 777, 0.3)

    slot = stepped(machine, SGD_CASE, fresh_layer(mask, state, 0), mask, "int32", shift=shift)

    assert slot.weight.data_ptr() % 16


@promise((0.0, 0.1), (0.9, 0.3))
def betas_and_decays_of_either_kind_follow_the_formula(
    machine: Machine, decay: float, beta1: float
) -> None:
    mask = random_mask(TILE, 0.3)
    hyper = replace(HYPER, step=7, betas=(beta1, 0.99), weight_decay=decay)
    for rule in RULES:
        layer = fresh_layer(mask, (BF16, BF16), rule.moments)
        stepped(machine, rule, layer, mask, "mask", hyper=hyper)


# -- roundings ------------------------------------------------------------------------------


def every_half(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def near_every_half(dtype: torch.dtype) -> Tensor:
    """fp32 numbers on, halfway between and next to all numbers of a half type."""
    values = every_half(dtype).float()
    values = values[values.isfinite()]
    bits = values.view(torch.int32)
    step = {BF16: 2**16, FP16: 2**13}[dtype]
    near = [bits, bits + step // 2, bits + step // 2 + 1, bits + step // 2 - 1]
    return torch.cat(near).view(FP32)


@promise((BF16, FP16))
def every_number_of_a_half_type_is_read_exactly(machine: Machine, dtype: torch.dtype) -> None:
    values = every_half(dtype)
    index = machine.index(torch.ones(values.numel(), dtype=torch.bool), "full")
    ours = machine.put(torch.zeros(values.numel()))

    compress(index, machine.put(values), ours, accumulate=False)

    same_bits(ours, values.float())


@promise((BF16, FP16))
def sums_round_to_the_nearest_with_ties_to_even(machine: Machine, dtype: torch.dtype) -> None:
    one, other = every_half(dtype), every_half(dtype).roll(12_345)
    index = machine.index(torch.ones(one.numel(), dtype=torch.bool), "full")
    ours = machine.put(one)

    compress(index, machine.put(other), ours, accumulate=True)

    same_bits(ours, (one.float() + other.float()).to(dtype))


@promise((BF16, FP16))
def masters_are_rounded_as_on_the_cpu(machine: Machine, dtype: torch.dtype) -> None:
    values = near_every_half(dtype)
    mask = torch.ones(values.numel(), dtype=torch.bool)
    layer, tensor = layer_of(mask, dtype, dtype)
    layer.optimizer_state.write_master(tensor, 0, values)
    slot = slot_of(machine, machine.index(mask, "full"), layer)
    still = replace(HYPER, learning_rate=0.0, weight_decay=0.0)
    slot.weight.zero_()

    SGD_CASE.device([slot], still, 1.0)

    same_bits(slot.weight, precision.round_to(values, dtype))
    same_state(slot, layer)


@promise()
def subnormal_numbers_stay_what_they_are(machine: Machine) -> None:
    tiny = torch.tensor([1e-40, -3e-41, 1e-45, 2e-39]).repeat(50)
    mask = torch.ones(tiny.numel(), dtype=torch.bool)
    layer = fresh_layer(mask, (FP32, FP32), 2)
    layer.gradient.copy_(tiny)
    partials = empty_partials(machine, tiny.numel())

    slot = stepped(machine, ADAMW_CASE, layer, mask, "full", factor=1.0)
    sum_squares(machine.launch, [(slot.gradient, partials)])

    assert bool((slot.moments[0] != 0).any())
    same_bits(partials, partials_of(tiny))
    assert bool((partials > 0).all())
