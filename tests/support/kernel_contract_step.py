"""What the step promises, as functions of the machine that it runs on."""

from __future__ import annotations

from dataclasses import replace

import torch
from support import kernel_reference as reference
from support.kernel_machine import (
    BF16,
    ENCODED,
    FACTOR,
    FP16,
    FP32,
    HYPER,
    RULES,
    STATES,
    Case,
    Machine,
    by_numpy,
    empty_partials,
    fresh_layer,
    layer_of,
    mask_for,
    promise,
    random_mask,
    randoms,
    same_bits,
    same_state,
    slot_of,
)
from torch import Tensor

from axsparse.samo import precision
from axsparse.samo.cuda.device_index import INDICES, DeviceKind
from axsparse.samo.cuda.kernels import adamw_step, compress, judge, sgd_step
from axsparse.samo.cuda.launch import GROUP, TILE, Argument
from axsparse.samo.optim.optimizer import TensorSlot
from axsparse.samo.optim.update import update
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import Encoding, MasterKind


@promise(RULES, tuple(INDICES), STATES)
def a_step_is_the_formulas_with_one_rounding_an_operation(
    machine: Machine,
    rule: Case,
    kind: DeviceKind,
    state: tuple[torch.dtype, torch.dtype, MasterKind],
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
        by_numpy(layer, rule, hyper, FACTOR)
        same_state(slot, layer)
    assert not slot.weight.cpu()[~mask].any()


@promise(tuple(INDICES), [1, 2, TILE, 3 * TILE, BLOCK + TILE + 5], [0.0005, 0.1, 0.95])
def tensors_of_any_size_and_density_are_stepped(
    machine: Machine, kind: DeviceKind, numel: int, density: float
) -> None:
    mask = mask_for(kind, numel, density)
    if numel == 1 and kind != "full":
        mask[0] = False
    layer = fresh_layer(mask, (BF16, BF16, "remainder"), 2)
    layer.gradient.copy_(randoms(layer.gradient.numel(), 5))
    slot = slot_of(machine, machine.index(mask, kind), layer)

    adamw_step([slot], HYPER, FACTOR)

    by_numpy(layer, RULES[0], HYPER, FACTOR)
    same_state(slot, layer)


@promise(ENCODED)
def a_tile_of_which_all_is_kept_is_stepped_whole(machine: Machine, kind: Encoding) -> None:
    mask = random_mask(BLOCK + 3 * TILE, 0.1)
    for tile in (0, 5, BLOCK // TILE - 1, BLOCK // TILE + 1):
        mask[tile * TILE : (tile + 1) * TILE] = True
    layer = fresh_layer(mask, (BF16, BF16, "fp32"), 1)
    layer.gradient.copy_(randoms(layer.gradient.numel(), 5))
    slot = slot_of(machine, machine.index(mask, kind), layer)

    sgd_step([slot], HYPER, FACTOR, momentum=0.9, nesterov=False)

    by_numpy(layer, RULES[2], HYPER, FACTOR)
    same_state(slot, layer)


@promise(RULES)
def a_step_is_the_one_of_the_cpu(machine: Machine, rule: Case) -> None:
    mask = random_mask(3 * TILE, 0.3)
    layer = fresh_layer(mask, (BF16, FP32, "fp32"), rule.moments)
    layer.gradient.copy_(randoms(layer.gradient.numel(), 5))
    slot = slot_of(machine, machine.index(mask, "mask"), layer)

    rule.device([slot], HYPER, FACTOR)
    update([layer], rule.torch, HYPER, FACTOR)

    same_state(slot, layer)


@promise(ENCODED, (STATES[0], STATES[1], STATES[-1]))
def a_share_of_the_entries_is_updated_and_the_others_keep_their_weights(
    machine: Machine, kind: Encoding, state: tuple[torch.dtype, torch.dtype, MasterKind]
) -> None:
    mask = random_mask(5 * TILE + 3, 0.2)
    layer = fresh_layer(mask, state, 2)
    layer.gradient.copy_(randoms(layer.gradient.numel(), 5))
    [tensor] = layer.tensors
    before = tensor.weight_D.clone()
    index = machine.index(mask, kind)
    whole = slot_of(machine, index, layer)
    by_numpy(layer, RULES[0], HYPER, FACTOR)
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

        adamw_step([slot], HYPER, FACTOR)

        expected = before.clone()
        places = tensor.index.positions()[part]
        expected[places] = tensor.weight_D[places]
        same_bits(slot.weight, expected)
        for ours, theirs in zip(
            slot.moments, layer.optimizer_state.moments_K.values(), strict=True
        ):
            same_bits(ours, theirs[part])
        if layer.optimizer_state.master_K is not None:
            assert slot.master is not None
            same_bits(slot.master, layer.optimizer_state.master_K[part])


@promise(RULES)
def tensors_of_the_same_types_are_stepped_together(machine: Machine, rule: Case) -> None:
    states = (STATES[1], STATES[3])
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
        by_numpy(layer, rule, HYPER, FACTOR)
        same_state(slot, layer)


@promise()
def more_tensors_than_a_launch_takes_are_stepped_by_several(machine: Machine) -> None:
    mask = random_mask(99, 0.3)
    index = machine.index(mask, "mask")
    layers = [fresh_layer(mask, STATES[0], 2) for _ in range(2 * GROUP + 1)]
    for number, layer in enumerate(layers):
        layer.gradient.copy_(randoms(layer.gradient.numel(), number))
    slots = [slot_of(machine, index, layer) for layer in layers]

    adamw_step(slots, HYPER, FACTOR)

    for slot, layer in zip(slots, layers, strict=True):
        by_numpy(layer, RULES[0], HYPER, FACTOR)
        same_state(slot, layer)


@promise((STATES[0], STATES[4], STATES[-1]), [1, 3])
def weights_need_not_stand_at_aligned_addresses(
    machine: Machine, state: tuple[torch.dtype, torch.dtype, MasterKind], shift: int
) -> None:
    mask = random_mask(TILE + 777, 0.3)
    layer = fresh_layer(mask, state, 0)
    layer.gradient.copy_(randoms(layer.gradient.numel(), 5))
    slot = slot_of(machine, machine.index(mask, "int32"), layer, shift)
    assert slot.weight.data_ptr() % 16

    sgd_step([slot], HYPER, FACTOR, momentum=0.0, nesterov=False)

    by_numpy(layer, RULES[1], HYPER, FACTOR)
    same_state(slot, layer)


@promise((0.0, 0.1), (0.9, 0.3))
def betas_and_decays_of_either_kind_follow_the_formula(
    machine: Machine, decay: float, beta1: float
) -> None:
    mask = random_mask(TILE, 0.3)
    hyper = replace(HYPER, step=7, betas=(beta1, 0.99), weight_decay=decay)
    for rule in RULES:
        layer = fresh_layer(mask, (BF16, BF16, "fp32"), rule.moments)
        layer.gradient.copy_(randoms(layer.gradient.numel(), 5))
        slot = slot_of(machine, machine.index(mask, "mask"), layer)
        rule.device([slot], hyper, FACTOR)
        by_numpy(layer, rule, hyper, FACTOR)
        same_state(slot, layer)


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


@promise(((BF16, "fp32"), (BF16, "remainder"), (FP16, "fp32")))
def masters_are_rounded_and_split_as_on_the_cpu(
    machine: Machine, state: tuple[torch.dtype, MasterKind]
) -> None:
    dtype, master = state
    values = near_every_half(dtype)
    mask = torch.ones(values.numel(), dtype=torch.bool)
    layer, tensor = layer_of(mask, torch.zeros(values.numel(), dtype=dtype), dtype, master, 0)
    layer.optimizer_state.write_master(tensor, 0, values)
    slot = slot_of(machine, machine.index(mask, "full"), layer)
    still = replace(HYPER, learning_rate=0.0, weight_decay=0.0)
    slot.weight.zero_() if master == "fp32" else None

    sgd_step([slot], still, 1.0, momentum=0.0, nesterov=False)

    same_bits(slot.weight, precision.round_to(values, dtype))
    same_state(slot, layer)
    if master == "remainder":
        assert slot.master is not None
        joined = precision.join(slot.weight.cpu(), slot.master.cpu())
        same_bits(joined[~joined.isnan()], values[~joined.isnan()])


@promise()
def a_master_that_is_no_number_leaves_no_remainder(machine: Machine) -> None:
    mask = random_mask(TILE, 0.5)
    layer = fresh_layer(mask, (BF16, FP32, "remainder"), 0)
    layer.gradient.copy_(randoms(layer.gradient.numel(), 5))
    layer.gradient[:9].view(torch.int32).fill_(0x7FC01234)  # what is left of it would be lower bits
    slot = slot_of(machine, machine.index(mask, "mask"), layer)

    sgd_step([slot], HYPER, FACTOR, momentum=0.0, nesterov=False)

    by_numpy(layer, RULES[1], HYPER, FACTOR)
    same_state(slot, layer)
    assert slot.master is not None
    assert slot.master[:9].tolist() == [0] * 9
    assert int(slot.weight.isnan().sum()) == 9


@promise()
def subnormal_numbers_stay_what_they_are(machine: Machine) -> None:
    tiny = torch.tensor([1e-40, -3e-41, 1e-45, 2e-39]).repeat(50)
    mask = torch.ones(tiny.numel(), dtype=torch.bool)
    layer = fresh_layer(mask, (FP32, FP32, "weight"), 2)
    layer.gradient.copy_(tiny)
    slot = slot_of(machine, machine.index(mask, "full"), layer)
    partials = empty_partials(machine, tiny.numel())

    adamw_step([slot], HYPER, 1.0)
    judge(machine.launch, [(slot.gradient, partials)])

    by_numpy(layer, RULES[0], HYPER, 1.0)
    same_state(slot, layer)
    assert bool((slot.moments[0] != 0).any())
    same_bits(partials, reference.partials(tiny))
    assert bool((partials > 0).all())
