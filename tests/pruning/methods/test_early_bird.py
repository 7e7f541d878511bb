"""The Early-Bird search: its distances, when it draws a mask, and how it is resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from axsparse.pruning.distribution import kept_entries
from axsparse.pruning.methods.early_bird import Decision, MaskConvergence, Metric
from axsparse.samo.selection import largest

examples = settings(max_examples=100, deadline=None, derandomize=True)
Round = Mapping[str, Tensor]

EVERY = 10


def search(
    metric: Metric = "churn", max_steps: int = 10_000, threshold: float = 0.1
) -> MaskConvergence:
    return MaskConvergence(
        interval=EVERY, start_step=0, max_steps=max_steps, threshold=threshold, metric=metric
    )


def mask_of(kept: Iterable[int], numel: int = 100) -> Tensor:
    mask = torch.zeros(numel, dtype=torch.bool)
    mask[list(kept)] = True
    return mask


def decide(one: MaskConvergence, step: int, masks: Round) -> Decision:
    mismatched = sum(one.compare(name, mask) for name, mask in masks.items())
    total = sum(mask.numel() for mask in masks.values())
    kept = sum(int(mask.sum()) for mask in masks.values())
    return one.decide(step, mismatched, total, kept)


def play(one: MaskConvergence, churns: Iterable[int], start: int = 0) -> list[str]:
    """The outcomes for distances of so many hundredths, with 50 of 1,000 entries kept."""
    return [
        one.decide(start + EVERY * number, churn, 1000, 50).outcome
        for number, churn in enumerate(churns)
    ]


# -- distances ------------------------------------------------------------------------------


def test_scripted_masks_give_the_distances_worked_out_by_hand() -> None:
    one = search()
    rounds = [
        {"a": mask_of(range(10)), "b": mask_of(range(10), 60)},
        {"a": mask_of(range(2, 12)), "b": mask_of(range(10), 60)},  # two entries left, two came
        {"a": mask_of(range(2, 12)), "b": mask_of(range(50, 60), 60)},  # all of b
    ]

    found = [decide(one, EVERY * number, masks) for number, masks in enumerate(rounds)]

    assert found == [
        Decision("search", None, None),
        Decision("search", 4 / 160, 4 / 40),
        Decision("search", 20 / 160, 20 / 40),
    ]


@examples
@given(st.integers(1, 40), st.data())
def test_packed_masks_differ_where_masks_do(numel: int, data: st.DataObject) -> None:
    bits = st.lists(st.booleans(), min_size=numel, max_size=numel).map(torch.tensor)
    before, after = data.draw(bits), data.draw(bits)
    one = search()
    one.compare("w", before)
    one.decide(0, 0, numel, 1)

    assert one.compare("w", after) == int((before != after).sum())


# -- when it draws --------------------------------------------------------------------------


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a_spike_keeps_the_search_going_for_exactly_five_rounds(at: int) -> None:
    churns = [0] * 20
    churns[at] = 50

    outcomes = play(search(), churns)

    assert outcomes.index("draw") == at + 5


def test_independent_masks_of_few_entries_are_close_by_hamming_distance_and_not_by_churn() -> None:
    generator = torch.Generator().manual_seed(0)
    numel, keep = 40_000, kept_entries(40_000, 0.95)
    masks = [{"w": largest(torch.rand(numel, generator=generator), keep)} for _ in range(12)]

    def outcomes(metric: Metric) -> list[str]:
        one = search(metric)
        return [decide(one, EVERY * at, round_).outcome for at, round_ in enumerate(masks)]

    assert outcomes("hamming")[5] == "draw"
    assert outcomes("churn") == ["search"] * 12


# -- when it looks, and when it gives up ----------------------------------------------------


def test_a_count_of_steps_that_comes_twice_has_one_round() -> None:
    one = search()
    one.decide(0, 0, 1000, 50)
    one.decide(EVERY, 0, 1000, 50)

    assert not one.due(EVERY)  # the next step overflowed
    assert one.due(2 * EVERY)


@pytest.mark.parametrize(
    ("max_steps", "churns", "last"),
    [(70, [50] * 8, "exhausted"), (79, [50] * 8, "exhausted"), (50, [0] * 6, "draw")],
)
def test_the_last_round_draws_or_says_that_it_is_the_last(
    max_steps: int, churns: list[int], last: str
) -> None:
    outcomes = play(search(max_steps=max_steps), churns)

    assert outcomes == ["search"] * (len(churns) - 1) + [last]


def test_masks_that_keep_nothing_have_settled() -> None:
    found = search(max_steps=50)

    outcomes = [found.decide(EVERY * step, 0, 100, 0).outcome for step in range(6)]

    assert outcomes == ["search"] * 5 + ["draw"]


def test_a_distance_at_the_threshold_is_not_below_it() -> None:
    assert play(search(threshold=0.1), [0, 0, 0, 0, 0, 10]) == ["search"] * 6
    assert play(search(threshold=0.1), [0, 0, 0, 0, 0, 9]) == ["search"] * 5 + ["draw"]


def test_six_masks_must_be_seen_however_alike_they_are() -> None:
    assert play(search(), [0] * 6) == ["search"] * 5 + ["draw"]
