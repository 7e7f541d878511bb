"""The figures of all ranks are combined one step late."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from axsparse.observe.step_gather import StepGather, StepTotals
from axsparse.runtime.communication import Op, Work


@dataclass
class Board:
    """For each all-reduce by number, the buffers of the ranks that have started it."""

    size: int
    buffers: list[list[Tensor]] = field(default_factory=list)


@dataclass
class FakeWork:
    """Done once every rank has put its buffer on the board and one rank has polled."""

    board: Board
    number: int

    def poll(self) -> bool:
        buffers = self.board.buffers[self.number]
        if len(buffers) == self.board.size:
            total = torch.stack(buffers).sum(dim=0)
            for buffer in buffers:
                buffer.copy_(total)
            # Summed once; later polls only learn that it is done.
            self.board.buffers[self.number] = [total] * (self.board.size + 1)
        return len(self.board.buffers[self.number]) > self.board.size


class FakeCollective:
    """One rank of several that live in this thread."""

    bytes_sent = 0

    def __init__(self, board: Board, rank: int) -> None:
        self.board = board
        self.rank = rank
        self.size = board.size
        self._started = 0

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        assert op is Op.ALL_REDUCE
        assert buffer.dtype == torch.float64
        assert buffer.is_contiguous()
        if self._started == len(self.board.buffers):
            self.board.buffers.append([])
        self.board.buffers[self._started].append(buffer)
        self._started += 1
        return FakeWork(self.board, self._started - 1)


class Meanwhile:
    """A back-off during which something else happens; by default it must not be used."""

    pauses = 0

    def __init__(self, happening: Callable[[], object] | None = None) -> None:
        self.happening = happening

    def pause(self) -> None:
        assert self.happening is not None, "waited for nothing that could come"
        happening, self.happening = self.happening, None
        happening()

    def reset(self) -> None:
        pass


def make_gathers(size: int, each: Sequence[str] = ()) -> list[StepGather]:
    board = Board(size)
    return [StepGather(FakeCollective(board, rank), Meanwhile(), each) for rank in range(size)]


def test_times_are_means_and_maxima_are_maxima_on_every_rank() -> None:
    gathers = make_gathers(3)

    for rank, gather in enumerate(gathers):
        times = {"compute": 1.0 + rank, "step": 4.0 * rank}
        gather.push(7, times, {"state": 10 - rank, "memory": [5, 9, 6][rank]})
    results = [gather.flush() for gather in gathers]

    expected = StepTotals(7, {"compute": 2.0, "step": 4.0}, {"state": 10, "memory": 9}, {})
    assert results == [expected] * 3


def test_times_that_are_wanted_of_each_rank_are_there_in_rank_order() -> None:
    gathers = make_gathers(3, each=["compute"])

    for rank, gather in enumerate(gathers):
        gather.push(7, {"compute": 1.5 + rank, "step": 4.0}, {"memory": 7 + rank})
    results = [gather.flush() for gather in gathers]

    expected = StepTotals(
        7, {"compute": 2.5, "step": 4.0}, {"memory": 9}, {"compute": [1.5, 2.5, 3.5]}
    )
    assert results == [expected] * 3


def test_one_rank_gathers_from_itself() -> None:
    (gather,) = make_gathers(1)

    gather.push(1, {"step": 0.3}, {"memory": 5})

    assert gather.flush() == StepTotals(1, {"step": 0.3}, {"memory": 5}, {})


def test_a_push_returns_the_step_before_it() -> None:
    gathers = make_gathers(2)

    first = [gather.push(1, {"step": 1.0}, {"memory": 1}) for gather in gathers]
    second = [gather.push(2, {"step": 2.0}, {"memory": 2}) for gather in gathers]
    last = [gather.flush() for gather in gathers]

    assert first == [None, None]
    assert second == [StepTotals(1, {"step": 1.0}, {"memory": 1}, {})] * 2
    assert last == [StepTotals(2, {"step": 2.0}, {"memory": 2}, {})] * 2


def test_a_rank_waits_for_the_others_only_at_its_next_push() -> None:
    board = Board(2)
    late = StepGather(FakeCollective(board, 1), Meanwhile())
    backoff = Meanwhile(lambda: late.push(1, {"step": 3.0}, {"memory": 8}))
    early = StepGather(FakeCollective(board, 0), backoff)

    early.push(1, {"step": 1.0}, {"memory": 4})
    assert backoff.happening is not None
    result = early.push(2, {"step": 1.0}, {"memory": 4})

    assert result == StepTotals(1, {"step": 2.0}, {"memory": 8}, {})


def test_the_largest_integers_stay_exact() -> None:
    gathers = make_gathers(2)

    for rank, gather in enumerate(gathers):
        gather.push(1, {"step": 1e-9}, {"memory": 2**53 - 1 - rank})
    results = [gather.flush() for gather in gathers]

    assert [result and result.maxima for result in results] == [{"memory": 2**53 - 1}] * 2


@pytest.mark.parametrize("value", [2**53 + 1, -1])
def test_an_integer_that_would_not_stay_exact_is_a_bug(value: int) -> None:
    (gather,) = make_gathers(1)

    with pytest.raises(AssertionError, match="no exact float"):
        gather.push(1, {}, {"memory": value})


def test_a_flush_without_a_push_is_empty_and_so_is_a_second_one() -> None:
    (gather,) = make_gathers(1)

    assert gather.flush() is None
    gather.push(1, {"step": 1.0}, {})
    gather.flush()
    assert gather.flush() is None
