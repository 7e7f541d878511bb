"""The counters of a run: the loss scale, and the best evaluation."""

from __future__ import annotations

import math

import pytest
from support.runs import tiny_config

from axsparse.config.schema import Config
from axsparse.pruning.methods.pruner import MaskUpdate
from axsparse.training.progress import HIGHEST, BestEntry, Progress

# -- the loss scale -----------------------------------------------------------------------------


def scaled(scale: float = 8.0, precision: str = "fp16") -> tuple[Config, Progress]:
    """Three good steps double the scale."""
    rule = {"initial": scale, "growth_interval": 3}
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
        (4.0, "---", [2, 1, 1]),
        (HIGHEST, "+++", [HIGHEST] * 3),
        (64 * HIGHEST, "+++-", [64 * HIGHEST] * 3 + [32 * HIGHEST]),  # initial is not bounded
    ],
)
def test_overflows_halve_the_scale_and_runs_of_good_steps_double_it_between_its_bounds(
    start: float, verdicts: str, expected: list[float]
) -> None:
    assert scales(start, verdicts) == expected


def test_a_scale_grows_though_a_resumed_run_has_more_good_steps_than_its_interval() -> None:
    config, progress = scaled(8.0)
    progress.good_steps = 5

    progress.rescale(config, finite=True)

    assert (progress.loss_scale, progress.good_steps) == (16.0, 0)


def test_steps_that_are_skipped_at_the_lowest_scale_are_counted_until_one_is_good() -> None:
    config, progress = scaled(2.0)
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
        progress.end_step(is_skipped=False)
    return progress


def test_only_evaluations_that_are_finite_and_of_what_is_saved_count() -> None:
    assert looked(0.1, math.nan).best is None
    assert looked(0.1, math.nan, 2.0, 2.0).best == BestEntry(step=2, loss=2.0)
    assert looked(0.1, 2.0, 1.0).best == BestEntry(step=2, loss=1.0)


def test_losses_of_other_masks_count_no_more() -> None:
    progress = looked(3.0, 2.0)

    progress.follow_masks(MaskUpdate("looked", changed=False))
    assert (progress.masks_changed, progress.best) == (None, BestEntry(step=1, loss=2.0))

    progress.follow_masks(MaskUpdate("pruned"))
    assert (progress.masks_changed, progress.best) == (2, None)
