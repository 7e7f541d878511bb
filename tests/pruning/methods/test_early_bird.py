"""The Early-Bird search: its distances, when it draws a mask, and how it is resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from axsparse.pruning.criteria import Criterion
from axsparse.pruning.methods.early_bird import EarlyBirdSearch, Outcome
from axsparse.pruning.targets import kept_entries
from axsparse.samo.selection import largest

Round = Mapping[str, Tensor]

EVERY = 10


def search(max_steps: int = 10_000) -> EarlyBirdSearch:
    live: Any = None  # The counts are given.
    return EarlyBirdSearch(live, Criterion("magnitude"), EVERY, 0, max_steps, threshold=0.1)


def mask_of(kept: Iterable[int], numel: int = 100) -> Tensor:
    mask = torch.zeros(numel, dtype=torch.bool)
    mask[list(kept)] = True
    return mask


def decide(one: EarlyBirdSearch, step: int, masks: Round) -> tuple[Outcome, dict[str, float]]:
    mismatched = sum(one.compare(name, mask) for name, mask in masks.items())
    total = sum(mask.numel() for mask in masks.values())
    kept = sum(int(mask.sum()) for mask in masks.values())
    return one.decide(step, mismatched, total, kept)


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
        ("search", {}),
        ("search", {"hamming": 4 / 160, "churn": 4 / 40}),
        ("search", {"hamming": 20 / 160, "churn": 20 / 40}),
    ]


# -- when it draws, and when it gives up -----------------------------------------------------


@pytest.mark.parametrize(
    ("churns", "max_steps", "last"),
    [
        # However alike the masks are, six must be seen.
        ([0] * 6, 10_000, "draw"),
        # A spike keeps the search going for exactly five rounds.
        *(([0] * at + [50] + [0] * 5, 10_000, "draw") for at in (1, 2, 3, 4, 5)),
        # A distance at the threshold is not below it.
        ([0, 0, 0, 0, 0, 10], 10_000, "search"),
        ([0, 0, 0, 0, 0, 9], 10_000, "draw"),
        # The last round draws, or says that it is the last.
        ([50] * 8, 70, "exhausted"),
        ([50] * 8, 79, "exhausted"),
        ([0] * 6, 50, "draw"),
    ],
)
def test_outcomes_of_rounds(churns: list[int], max_steps: int, last: str) -> None:
    """Distances are in hundredths, since 50 of 1,000 entries are kept."""
    one = search(max_steps=max_steps)

    kept = 50 if any(churns) else 0  # masks that keep nothing have settled
    found = [one.decide(EVERY * at, churn, 1000, kept)[0] for at, churn in enumerate(churns)]

    assert found == ["search"] * (len(churns) - 1) + [last]


def test_independent_masks_of_few_entries_never_settle_though_most_entries_are_in_neither() -> None:
    generator = torch.Generator().manual_seed(0)
    numel, keep = 40_000, kept_entries(40_000, 0.95)
    masks = [{"w": largest(torch.rand(numel, generator=generator), keep)} for _ in range(12)]

    one = search()
    found = [decide(one, EVERY * at, round_) for at, round_ in enumerate(masks)]

    assert [outcome for outcome, _ in found] == ["search"] * 12
    assert all(distances["hamming"] < 0.1 for _, distances in found[1:])


def test_a_count_of_steps_that_comes_twice_has_one_round() -> None:
    one = search()
    one.decide(0, 0, 1000, 50)
    one.decide(EVERY, 0, 1000, 50)

    assert not one.is_due(EVERY)  # the next step overflowed
    assert one.is_due(2 * EVERY)
