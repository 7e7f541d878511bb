"""N:M masks keep the N largest of every M neighbours, and lower positions among equals."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from axsparse.pruning import pattern
from axsparse.pruning.pattern import check_pattern, n_of_m, parse_pattern
from axsparse.runtime.errors import ConfigError

examples = settings(max_examples=100, deadline=None, derandomize=True)


def by_hand(score: Tensor, n: int, m: int) -> Tensor:
    """An oracle that sorts one group at a time."""
    mask = torch.zeros(score.shape, dtype=torch.bool)
    rows, inputs = score.shape[:2]
    flat, flat_mask = score.reshape(rows, inputs, -1), mask.view(rows, inputs, -1)
    for row, place in itertools.product(range(rows), range(flat.shape[2])):
        for start in range(0, inputs, m):
            group = flat[row, start : start + m, place].tolist()
            best = sorted(range(m), key=lambda at: (-group[at], at))[:n]
            flat_mask[row, [start + at for at in best], place] = True
    return mask


@st.composite
def scores(draw: st.DrawFn) -> tuple[Tensor, int, int]:
    m = draw(st.integers(2, 8))
    n = draw(st.integers(1, m - 1))
    kernel = draw(st.sampled_from([(), (3,), (2, 3)]))
    shape = (draw(st.integers(1, 4)), m * draw(st.integers(1, 3)), *kernel)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    few_values = torch.randint(0, 4, shape, generator=generator)
    return few_values.float(), n, m


# -- masks ----------------------------------------------------------------------------------


@examples
@given(scores())
def test_masks_are_those_of_one_group_at_a_time(drawn: tuple[Tensor, int, int]) -> None:
    score, n, m = drawn

    mask = n_of_m(score, n, m)

    assert mask.dtype == torch.bool
    assert torch.equal(mask, by_hand(score, n, m))


def test_two_of_four_of_a_linear_go_along_its_inputs() -> None:
    score = torch.tensor([[1.0, 4, 2, 3, 9, 8, 7, 6], [0, 0, 0, 0, 1, 0, 0, 1]])

    assert n_of_m(score, 2, 4).int().tolist() == [
        [0, 1, 0, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 1],
    ]


def test_a_convolution_keeps_two_of_four_input_channels_at_each_place_of_its_kernel() -> None:
    score = torch.randn(3, 8, 2, 2, generator=torch.Generator().manual_seed(0))

    mask = n_of_m(score, 2, 4)

    assert mask.view(3, 2, 4, 4).sum(dim=2).unique().tolist() == [2]


@pytest.mark.parametrize("chunk", [1, 8, 24, 100])
def test_chunks_leave_no_trace(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    score = torch.randn(11, 8, generator=torch.Generator().manual_seed(0))
    whole = n_of_m(score, 1, 4)
    monkeypatch.setattr(pattern, "CHUNK", chunk)

    assert torch.equal(n_of_m(score, 1, 4), whole)


def test_scores_may_lie_in_any_order_of_memory_and_stay_as_they_are() -> None:
    score = torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).t()
    before = score.clone()

    assert torch.equal(n_of_m(score, 2, 4), n_of_m(score.contiguous(), 2, 4))
    assert torch.equal(score, before)


# -- words ----------------------------------------------------------------------------------


def test_a_pattern_is_two_numbers() -> None:
    assert parse_pattern("2:4") == (2, 4)
    assert parse_pattern("1:16") == (1, 16)


@pytest.mark.parametrize("text", ["4:2", "4:4", "0:4", "2-4", "2:4:8", "2:", "", "-1:4", "2.0:4"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_pattern(text)

    assert str(refused.value) == (
        f"pruning.pattern: {text!r} is not N:M with 0 < N < M; write 2:4 to keep two of every four"
    )


def test_a_tensor_whose_inputs_are_no_multiple_is_refused_by_name() -> None:
    check_pattern("stem.conv.weight", (64, 4, 7, 7), 2, 4)

    with pytest.raises(ConfigError) as refused:
        check_pattern("stem.conv.weight", (64, 3, 7, 7), 2, 4)

    assert str(refused.value) == (
        "stem.conv.weight: 2:4 runs along dimension 1 of its shape (64, 3, 7, 7), which is not a "
        "multiple of 4; name it in pruning.exclude"
    )
