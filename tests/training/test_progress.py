"""The counters of a run: losses that jump, the loss scale, and the best evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.runs import tiny_config

from axsparse.config.schema import Config, SpikesConfig
from axsparse.pruning.methods.pruner import MaskUpdate
from axsparse.training.progress import HIGHEST, BestEntry, Progress, Spike, SpikeHistory

# -- spikes -----------------------------------------------------------------------------------


class Judging:
    """A history of losses, after some good ones, under settings that skip, with a window of four
    losses."""

    def __init__(self, good: Sequence[float] = (), **changes: Any) -> None:
        self.settings = SpikesConfig(**{"rule": "skip", "window": 4, **changes})
        self.history = SpikeHistory()
        for loss in good:
            assert self.decide(1, loss) is None

    def decide(self, step: int, loss: float) -> Spike | None:
        return self.history.decide(self.settings, step, loss)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    level=st.floats(-5, 12), ratio=st.floats(1.01, 50), beyond=st.sampled_from([-0.01, 0.01, 3.0])
)
def test_a_spike_is_a_perplexity_so_many_times_the_usual_one(
    level: float, ratio: float, beyond: float
) -> None:
    decide = Judging([level] * 4, ratio=ratio).decide

    spike = decide(7, level + math.log(ratio) + beyond)

    assert (spike is not None) == (beyond > 0)


def test_the_usual_loss_is_the_median_of_the_last_good_steps() -> None:
    watching = Judging([9.0, 9.0, 3.0, 1.0, 2.5, 1.5])

    assert watching.decide(7, 3.0) == Spike(7, 3.0, 2.0)


def test_a_spike_does_not_become_usual_and_none_is_seen_before_the_window_is_full() -> None:
    watching = Judging([1.0, 1.0, 1.0])
    assert watching.decide(4, 1.0) is None

    assert all(watching.decide(step, 5.0) is not None for step in range(20))
    assert watching.history.in_a_row == 20
    assert watching.decide(21, 1.0) is None
    assert watching.history.in_a_row == 0


def test_a_run_that_goes_on_judges_by_the_losses_of_its_own_window() -> None:
    watching = Judging([9.0, 9.0, 9.0, 9.0, 1.0, 1.0, 1.0], window=7)
    watching.settings = SpikesConfig(rule="skip", window=3)

    assert watching.decide(8, 5.0) == Spike(8, 5.0, 1.0)


# -- the loss scale -----------------------------------------------------------------------------


def scaled(scale: float = 8.0, precision: str = "fp16") -> tuple[Config, Progress]:
    """A floor of 2, and three good steps that double the scale."""
    rule = {"initial": scale, "floor": 2.0, "growth_interval": 3, "patience": 2}
    config = tiny_config(precision=precision, loss_scale=rule)
    return config, Progress.at_start(config)


def scales(scale: float, verdicts: str, precision: str = "fp16") -> list[float]:
    """The scale after each step of a history such as "++-": good, good, overflow."""
    config, progress = scaled(scale, precision)
    trace = []
    for verdict in verdicts:
        progress.rescale(config, finite=verdict == "+")
        trace.append(progress.loss_scale)
    return trace


@pytest.mark.parametrize(
    ("start", "verdicts", "expected"),
    [
        (8.0, "-+++++-+++", [4, 4, 4, 8, 8, 8, 4, 4, 4, 8]),  # three good steps double it
        (8.0, "++-++-++", [8, 8, 4, 4, 4, 2, 2, 2]),  # an overflow starts their number anew
        (4.0, "---", [2, 2, 2]),
        (HIGHEST, "+++", [HIGHEST] * 3),
    ],
)
def test_overflows_halve_the_scale_and_runs_of_good_steps_double_it_between_its_bounds(
    start: float, verdicts: str, expected: list[float]
) -> None:
    assert scales(start, verdicts) == expected


def test_steps_that_are_skipped_at_the_floor_are_counted_until_one_is_good() -> None:
    config, progress = scaled(4.0)
    counts = []
    for verdict in "--+---":
        progress.rescale(config, finite=verdict == "+")
        counts.append(progress.skipped_at_floor)

    assert counts == [0, 1, 0, 1, 2, 3]


def test_a_loss_that_is_not_finite_counts_at_any_scale() -> None:
    config, progress = scaled(64.0)
    for _ in range(2):
        progress.rescale(config, finite=False, loss_is_finite=False)

    assert progress.skipped_at_floor == 2
    assert progress.loss_scale == 16.0


# -- between steps ------------------------------------------------------------------------------


def looked(*losses: float) -> Progress:
    """The progress of a run that is evaluated before its first step and after each."""
    progress = Progress.at_start(tiny_config())
    for loss in losses:
        progress.look(loss)
        progress.end_step()
    return progress


def test_only_evaluations_that_are_finite_and_of_what_is_saved_count() -> None:
    assert looked(0.1, math.nan).best is None
    assert looked(0.1, math.nan, 2.0, 2.0).best == BestEntry(step=2, loss=2.0)
    assert looked(0.1, 2.0, 1.0).best == BestEntry(step=2, loss=1.0)


def test_losses_of_other_masks_count_no_more() -> None:
    progress = looked(3.0, 2.0)
    progress.spikes.losses = [1.0]

    progress.follow_masks(MaskUpdate("looked", changed=False))
    assert (progress.masks_changed, progress.best) == (None, BestEntry(step=1, loss=2.0))

    progress.follow_masks(MaskUpdate("pruned"))
    assert (progress.masks_changed, progress.best, progress.spikes.losses) == (2, None, [])


def test_what_was_done_between_two_steps_is_due_again_after_the_next() -> None:
    progress = looked()
    progress.evaluated = progress.masked = True

    progress.end_step()

    assert (progress.step, progress.evaluated, progress.masked) == (1, False, False)


def test_a_copy_stays_as_it_is() -> None:
    progress = looked(1.0, 1.0)
    copy = progress.copied()
    progress.spikes.losses.append(1.0)
    progress.exponents["weight"] = 3

    assert (copy.spikes.losses, copy.exponents) == ([], {})
