"""What indices and compression promise, as functions of the machine that they run on."""

from __future__ import annotations

import math

import numpy as np
import torch
from support import kernel_reference as reference
from support.kernel_machine import (
    BF16,
    DENSITIES,
    ENCODED,
    FP16,
    FP32,
    NUMBERS,
    SIZES,
    Machine,
    empty_partials,
    layer_of,
    mask_for,
    promise,
    random_mask,
    randoms,
    same_bits,
)

from axsparse.samo.cuda.device_index import INDICES, DeviceKind, make_device_index
from axsparse.samo.cuda.kernels import NORM_TOLERANCE, compress, judge
from axsparse.samo.cuda.launch import CHUNK, SUMMED, TILE, Argument
from axsparse.samo.index.base import make_index
from axsparse.samo.optim.gradient_norm import norm_partials
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import MASK_BLOCK, Encoding, index_bytes, master_kind

# -- indices --------------------------------------------------------------------------------


@promise(ENCODED, SIZES, DENSITIES)
def an_index_is_the_one_of_the_cpu(
    machine: Machine, kind: Encoding, numel: int, density: float
) -> None:
    mask = random_mask(numel, density) if numel > 1 else torch.zeros(1, dtype=torch.bool)
    positions = mask.nonzero().view(-1)

    index = machine.index(mask, kind)

    assert (index.kept, index.numel) == (positions.numel(), numel)
    assert index.nbytes == index_bytes(numel, index.kept, kind)
    assert torch.equal(index.positions().cpu(), positions)
    assert torch.equal(index.positions_by_host(), positions)
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


@promise(tuple(INDICES), NUMBERS, [1, CHUNK + 1, BLOCK + 77])
def gradients_are_compressed_and_added_as_on_the_cpu(
    machine: Machine, kind: DeviceKind, types: tuple[torch.dtype, torch.dtype], numel: int
) -> None:
    weight, gradient = types
    mask = mask_for(kind, numel, 0.3) if numel > 1 else torch.tensor([kind == "full"])
    master = master_kind(half=weight != FP32, split=False)
    layer, tensor = layer_of(mask, torch.zeros(numel, dtype=weight), gradient, master, 0)
    index = machine.index(mask, kind)
    ours = machine.put(torch.full((index.kept,), math.nan, dtype=gradient))

    for microbatch in range(3):
        dense = randoms(numel, microbatch, weight)
        layer.accumulate(tensor, dense)
        compress(index, machine.put(dense), ours, accumulate=microbatch > 0)
        same_bits(ours, layer.gradient)


@promise(NUMBERS, [0, 1, CHUNK - 1, BLOCK, BLOCK + CHUNK + 3])
def sums_of_squares_are_the_same_bits_in_every_encoding(
    machine: Machine, types: tuple[torch.dtype, torch.dtype], kept: int
) -> None:
    weight, gradient = types
    mask = torch.zeros(2 * BLOCK + 3 * CHUNK, dtype=torch.bool)
    places = torch.randperm(mask.numel(), generator=torch.Generator().manual_seed(kept))[:kept]
    mask[places] = True
    dense = randoms(mask.numel(), 1, weight)
    master = master_kind(half=weight != FP32, split=False)
    layer, tensor = layer_of(mask, torch.zeros_like(dense), gradient, master, 0)
    layer.accumulate(tensor, dense)
    expected = reference.partials(layer.gradient)

    for kind in (*ENCODED, None):
        partials = empty_partials(machine, kept)
        if kind is None:
            judge(machine.launch, [(machine.put(layer.gradient), partials)])
        else:
            index = machine.index(mask, kind)
            ours = machine.put(torch.zeros(kept, dtype=gradient))
            compress(index, machine.put(dense), ours, accumulate=False, partials=partials)
        same_bits(partials, expected)
    theirs = norm_partials([layer], ["w"])["w"]
    torch.testing.assert_close(expected, theirs, rtol=NORM_TOLERANCE, atol=0)


@promise(ENCODED, [math.inf, -math.inf, math.nan], [True, False])
def a_gradient_that_is_not_finite_is_found_where_it_is_kept(
    machine: Machine, kind: Encoding, value: float, kept: bool
) -> None:
    mask = random_mask(2 * TILE + 9, 0.2)
    dense = randoms(mask.numel(), 1, BF16)
    dense[(mask == kept).nonzero()[-1]] = value
    index = machine.index(mask, kind)
    partials = empty_partials(machine, index.kept)
    gradient = machine.put(torch.zeros(index.kept, dtype=BF16))

    compress(index, machine.put(dense), gradient, accumulate=False, partials=partials)

    assert bool(partials.isfinite().all()) == (not kept)


@promise()
def a_sum_that_overflows_its_type_is_found(machine: Machine) -> None:
    mask = random_mask(TILE + 1, 0.5)
    index = machine.index(mask, "mask")
    dense = machine.put(torch.full((TILE + 1,), 60_000.0, dtype=FP16))
    gradient = machine.put(torch.zeros(index.kept, dtype=FP16))
    partials = empty_partials(machine, index.kept)
    for accumulate in (False, True):
        compress(index, dense, gradient, accumulate=accumulate, partials=partials)
        assert bool(partials.isfinite().all()) == (not accumulate)
    partials.zero_()
    judge(machine.launch, [(gradient, partials)])
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

    judge(counted, parts)

    for values, (_, partials) in zip(gradients, parts, strict=True):
        same_bits(partials, reference.partials(values))
    filled = sum(size > 0 for size in sizes)
    assert len(launched) == 2 * -(-filled // SUMMED)
