"""The promises of every `Collective`, as functions that each rank of a transport calls."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import torch
from support.runs import all_here
from torch import Tensor

from axsparse.runtime.communication import Collective, Op, Transport, Work, shard_bounds, wait
from axsparse.runtime.exchange import exchanged_bytes, sum_in_rank_order

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8)
SIZES = (0, 1, 2, 37, 1000)
MARGIN = 5
"""Entries before and after a buffer that no operation may touch."""
REDUCTIONS = (Op.ALL_REDUCE, Op.REDUCE_SCATTER)


def every_operation_does_what_it_says(transport: Transport) -> None:
    _check(transport, transport.world, list(Op), SIZES)


def a_group_counts_and_adds_in_the_order_it_was_made_with(transport: Transport) -> None:
    ranks = list(reversed(range(transport.size)))
    group = transport.collective("reversed", ranks)

    assert (group.rank, group.size) == (ranks.index(transport.rank), transport.size)
    _check(transport, group, list(Op), [37])


def a_group_of_some_ranks_works_without_the_others(transport: Transport) -> None:
    ranks = sorted({transport.size - 1, 0}, reverse=True)
    if transport.rank not in ranks:
        return
    group = transport.collective("ends", ranks)

    assert (group.rank, group.size) == (ranks.index(transport.rank), len(ranks))
    _check(transport, group, list(Op), [37])


def operations_in_flight_may_be_polled_in_any_order(transport: Transport) -> None:
    groups = [
        transport.world,
        transport.collective("one", range(transport.size)),
        transport.collective("other", range(transport.size)),
    ]
    cases = [
        _Case(op, dtype, numel, shard_bounds(numel, transport.size), salt)
        for salt, (op, dtype, numel) in enumerate(
            (op, dtype, numel)
            for numel in (20_000, 3)
            for op in Op
            for dtype in (torch.bfloat16, torch.float32)
        )
    ]
    started = [(case, case.start(groups[case.salt % len(groups)])) for case in cases]
    pending: list[Work] = [work for _, (work, _) in started]
    chance = random.Random(transport.rank)  # noqa: S311 - another order on every rank

    transport.backoff.reset()
    while pending:
        chance.shuffle(pending)
        pending = [work for work in pending if not work.poll()]
        transport.backoff.pause()

    for case, (work, buffer) in started:
        assert work.poll(), "what is done stays done"
        case.check(buffer, transport.rank, transport.size)


def a_buffer_lives_until_its_operation_is_done(transport: Transport) -> None:
    group = transport.collective("alive", range(transport.size))
    for op in Op:
        for dtype in (np.float64, np.float32):
            # The array lives as long as the memory of any tensor that is made from it.
            array = np.zeros(1000, dtype)
            alive = weakref.ref(array)
            if group.rank > 0:
                all_here(transport)
            work = group.start(op, torch.from_numpy(array))
            del array
            if group.rank == 0 and group.size > 1 and op is not Op.BROADCAST:
                assert alive() is not None, "nobody else has started: this cannot be done"
            if group.rank == 0:
                all_here(transport)
            wait(work, transport.backoff)


def bytes_sent_is_the_volume_of_the_exchange(transport: Transport) -> None:
    group = transport.collective("bytes", range(transport.size))
    assert group.bytes_sent == 0
    for op in Op:
        for dtype in (torch.bfloat16, torch.float32, torch.int64):
            for bounds in _bounds(37, group.size):
                before = group.bytes_sent
                _run(transport, group, _Case(op, dtype, 37, bounds))
                wanted = exchanged_bytes(op, bounds, group.rank, dtype.itemsize)
                assert group.bytes_sent - before == wanted, (op, dtype, bounds)


def a_buffer_without_bounds_is_cut_into_even_shards(transport: Transport) -> None:
    group, numel = transport.world, 37
    case = _Case(Op.REDUCE_SCATTER, torch.float32, numel, shard_bounds(numel, group.size))
    buffer = case.buffer(group.rank)

    wait(group.start(case.op, buffer), transport.backoff)

    case.check(buffer, group.rank, group.size)


CONTRACT: tuple[Callable[[Transport], None], ...] = (
    every_operation_does_what_it_says,
    a_group_counts_and_adds_in_the_order_it_was_made_with,
    a_group_of_some_ranks_works_without_the_others,
    operations_in_flight_may_be_polled_in_any_order,
    a_buffer_lives_until_its_operation_is_done,
    bytes_sent_is_the_volume_of_the_exchange,
    a_buffer_without_bounds_is_cut_into_even_shards,
)


class _Case:
    """One operation: the input of each rank, and its expected result."""

    def __init__(
        self, op: Op, dtype: torch.dtype, numel: int, bounds: Sequence[int], salt: int = 0
    ) -> None:
        self.op, self.dtype, self.numel, self.bounds, self.salt = op, dtype, numel, bounds, salt

    def part(self, rank: int, size: int) -> Tensor:
        """The start values of a rank: their sum depends on the order of adding."""
        generator = torch.Generator().manual_seed(1000 * self.salt + rank)
        if not self.dtype.is_floating_point:
            return torch.randint(0, 256, (self.numel,), generator=generator).to(self.dtype)
        if self.op is Op.ALL_REDUCE and self.dtype == torch.float64:
            # Agreements only: every element has one contributor, no order is promised.
            values = torch.randn(self.numel, dtype=torch.float64, generator=generator)
            return values * (torch.arange(self.numel) % size == rank)
        spread = torch.randint(-6, 7, (self.numel,), generator=generator)
        return (torch.randn(self.numel, generator=generator) * 2.0**spread).to(self.dtype)

    def buffer(self, rank: int, size: int = 1) -> Tensor:
        """A rank's part amid entries that belong to somebody else."""
        whole = torch.full((self.numel + 2 * MARGIN,), 77).to(self.dtype)
        buffer = whole[MARGIN : MARGIN + self.numel]
        buffer.copy_(self.part(rank, size))
        return buffer

    def start(self, group: Collective) -> tuple[Work, Tensor]:
        buffer = self.buffer(group.rank, group.size)
        return group.start(self.op, buffer, self.bounds), buffer

    def check(self, buffer: Tensor, rank: int, size: int) -> None:
        case = (self.op, self.dtype, self.numel, list(self.bounds))
        parts = [self.part(other, size) for other in range(size)]
        own = slice(self.bounds[rank], self.bounds[rank + 1])
        if self.op in REDUCTIONS:
            wanted = sum_in_rank_order(parts)
            if self.op is Op.REDUCE_SCATTER:
                wanted, buffer_shard = wanted[own], buffer[own]
            else:
                buffer_shard = buffer
            assert torch.equal(buffer_shard, wanted), case
        elif self.op is Op.BROADCAST:
            assert torch.equal(buffer, parts[0]), case
        else:
            shards = [parts[m][self.bounds[m] : self.bounds[m + 1]] for m in range(size)]
            assert torch.equal(buffer, torch.cat(shards)), case
        whole = buffer.as_strided((self.numel + 2 * MARGIN,), (1,), 0)
        assert (whole[:MARGIN] == 77).all() and (whole[-MARGIN:] == 77).all(), case


def _check(
    transport: Transport, group: Collective, ops: Sequence[Op], sizes: Sequence[int]
) -> None:
    for op in ops:
        for dtype in DTYPES:
            for numel in sizes:
                for bounds in _bounds(numel, group.size):
                    _run(transport, group, _Case(op, dtype, numel, bounds))


def _run(transport: Transport, group: Collective, case: _Case) -> None:
    work, buffer = case.start(group)
    wait(work, transport.backoff)
    case.check(buffer, group.rank, group.size)


def _bounds(numel: int, size: int) -> list[list[int]]:
    """Even shards, everything in the last one, and shards of growing size."""
    growing = [numel * rank * rank // (size * size) for rank in range(size + 1)]
    return [shard_bounds(numel, size), [0] * size + [numel], growing]
