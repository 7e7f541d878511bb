"""The loss scale as a state machine."""

from __future__ import annotations

from axsparse.samo.optim.loss_scale import HIGHEST, LossScale


def scales(scale: LossScale, verdicts: str) -> list[float]:
    """The scale after each step of a history such as "++-": good, good, overflow."""
    trace = []
    for verdict in verdicts:
        scale.update(finite=verdict == "+")
        trace.append(scale.scale)
    return trace


def dynamic(scale: float = 8.0, patience: int = 2) -> LossScale:
    return LossScale(scale=scale, floor=2.0, growth_interval=3, patience=patience)


def test_an_overflow_halves_the_scale_and_a_run_of_good_steps_doubles_it() -> None:
    assert scales(dynamic(), "-+++++-+++") == [4, 4, 4, 8, 8, 8, 4, 4, 4, 8]


def test_an_overflow_starts_the_run_of_good_steps_anew() -> None:
    assert scales(dynamic(), "++-++-++") == [8, 8, 4, 4, 4, 2, 2, 2]


def test_the_scale_stays_between_floor_and_ceiling() -> None:
    assert scales(dynamic(scale=4.0), "---") == [2, 2, 2]
    assert scales(dynamic(scale=HIGHEST), "+++") == [HIGHEST] * 3


def test_a_run_is_lost_after_patience_overflows_in_a_row_at_the_floor() -> None:
    scale = dynamic(scale=4.0)
    exhausted = []
    for verdict in "--+---":
        scale.update(finite=verdict == "+")
        exhausted.append(scale.exhausted)

    assert exhausted == [False, False, False, False, True, True]


def test_without_scaling_the_scale_is_one_for_ever_but_patience_counts() -> None:
    scale = LossScale.none(patience=2)

    assert scales(scale, "+" * 5000 + "-") == [1.0] * 5001
    assert not scale.exhausted
    scale.update(finite=False)
    assert scale.exhausted


def test_a_loss_that_is_not_finite_counts_at_any_scale() -> None:
    scale = dynamic(scale=64.0)
    for _ in range(2):
        scale.update(finite=False, loss_is_finite=False)

    assert scale.exhausted
    assert scale.scale == 16.0
