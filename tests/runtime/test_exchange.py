"""Exchanges between ranks, and how they end."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import on_ranks

from axsparse.runtime.communication import Op, Transport, shard_bounds
from axsparse.runtime.errors import ConfigError, DataError
from axsparse.runtime.exchange import (
    PIECE,
    exchanged_bytes,
    leave_together,
    meet,
    store_sum_in_rank_order,
    sum_in_rank_order,
    together,
    value_of_first,
)


def endings(*ends: str) -> list[str]:
    """The end of each rank: one "leaves", the others work together, of which one "fails", or make
    a call."""

    def fail() -> None:
        raise DataError("no data here")

    def body(transport: Transport) -> str:
        end = ends[transport.rank]
        try:
            if end == "leaves":
                leave_together(transport)
            elif end.startswith("calls"):
                assert meet(transport, end, value=transport.rank) == sum(range(len(ends)))
            else:
                together(transport, fail if end == "fails" else lambda: None)
        except (ConfigError, DataError) as error:
            return str(error) if error.on_all_ranks else "fails alone"
        return ""

    return on_ranks(len(ends), body)


RULE = (
    "make the same trainers on all ranks, and the same calls of them in the same order "
    "(`if trainer.rank == 0` is for what no other rank does)"
)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (
            ("works", "leaves", "leaves"),
            f"rank 1 has ended, and rank 0 is in the middle of a call; {RULE}",
        ),
        (("leaves", "works"), f"rank 1 is in the middle of a call, and rank 0 has ended; {RULE}"),
        (("calls a", "calls a", "calls b"), f"rank 2 calls b, and rank 0 calls a; {RULE}"),
        (("calls a", "leaves"), f"rank 1 has ended, and rank 0 calls a; {RULE}"),
        (("leaves",) * 3, ""),
        (("calls a",) * 3, ""),  # and learn the sum of their values
        (("fails", "leaves"), "no data here"),
    ],
)
def test_all_ranks_have_one_ending_which_names_those_that_do_different_things(
    ends: tuple[str, ...], said: str
) -> None:
    assert endings(*ends) == [said] * len(ends)


@pytest.mark.parametrize("text", ["", "two words", "Grüße", "a\udcff name that is no UTF-8"])
def test_all_ranks_learn_the_text_of_the_first(text: str) -> None:
    said = on_ranks(3, lambda one: value_of_first(one, "another" if one.rank else text))

    assert said == [text] * 3


def bytes_sent(ranks: int) -> int:
    """Bytes that all ranks together hand over to do some work together and read one text."""

    def body(transport: Transport) -> int:
        together(transport, lambda: None)
        value_of_first(transport, "the same for all")
        return transport.world.bytes_sent

    return sum(on_ranks(ranks, body))


def test_what_every_start_exchanges_grows_no_faster_than_the_ranks() -> None:
    assert bytes_sent(33) == 32 * bytes_sent(2)


examples = settings(max_examples=60, deadline=None, derandomize=True)


def test_parts_are_added_first_to_last() -> None:
    parts = [torch.tensor([value]) for value in (1e8, 1.0, -1e8, 1.0)]

    assert sum_in_rank_order(parts).item() == ((1e8 + 0.0) - 1e8) + 1.0
    assert sum_in_rank_order(parts[::-1]).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_added_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    one, little = torch.ones(1, dtype=dtype), torch.tensor([2.0**-12], dtype=dtype)

    total = sum_in_rank_order([one] + [little] * 64)

    assert total.dtype == dtype
    assert total.item() == 1 + 64 * 2.0**-12


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.int64])
@pytest.mark.parametrize("numel", [0, 1, PIECE, 2 * PIECE + 3])
def test_a_stored_sum_may_take_the_place_of_any_of_its_parts(
    numel: int, dtype: torch.dtype, count: int
) -> None:
    generator = torch.Generator().manual_seed(numel)
    parts = [(9 * torch.randn(numel, generator=generator)).to(dtype) for _ in range(count)]
    wanted = sum_in_rank_order(parts)

    for place in range(count):
        own = [part.clone() for part in parts]
        store_sum_in_rank_order(own, own[place])
        assert torch.equal(own[place], wanted)
        assert all(torch.equal(own[p], parts[p]) for p in range(count) if p != place)


@examples
@given(st.integers(0, 1000), st.integers(1, 7), st.sampled_from([2, 4, 8]))
def test_all_ranks_together_hand_over_the_rings_volume(
    numel: int, size: int, itemsize: int
) -> None:
    bounds = shard_bounds(numel, size)

    def total(op: Op) -> int:
        return sum(exchanged_bytes(op, bounds, rank, itemsize) for rank in range(size))

    assert total(Op.ALL_REDUCE) == 2 * (size - 1) * numel * itemsize
    assert total(Op.REDUCE_SCATTER) == (size - 1) * numel * itemsize
    assert total(Op.ALL_GATHER) == (size - 1) * numel * itemsize
    assert total(Op.BROADCAST) == (size - 1) * numel * itemsize
