"""The fit finds constants again, and leaves alone what rows say nothing about."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from support.published_runs import run, selene

from axsparse.planner.cluster import Cluster
from axsparse.planner.published.constant_fit import FITTABLE, fit_constants
from axsparse.planner.published.run_file import RunRow
from axsparse.planner.published.run_step import predict_step

ROWS = [
    run(recompute="full"),
    run(model={"hidden_size": 8192, "num_heads": 64}, recompute="full"),
    run(layout={"data": 64, "tensor": 4}, samples=64, micro=1, gradients="fp32"),
]


def found_again(truth: Cluster, rows: Sequence[RunRow]) -> Cluster:
    measured = [predict_step(row, truth).seconds for row in rows]

    def errors(tried: Cluster) -> list[float]:
        return [
            math.log(predict_step(row, tried).seconds / seconds)
            for row, seconds in zip(rows, measured, strict=True)
        ]

    return fit_constants(selene(), errors)[0]


def test_rows_that_tell_constants_apart_find_them_again() -> None:
    truth = selene(efficiency=0.7, traffic=1.6, nic_efficiency=0.6)

    found = found_again(truth, ROWS)

    for name in FITTABLE:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.05)


def test_a_constant_without_evidence_stays() -> None:
    found = found_again(selene(efficiency=0.7, nic_efficiency=0.5), ROWS[:1])

    assert found.nic_efficiency == selene().nic_efficiency
    assert found.efficiency < selene().efficiency


def test_one_row_far_off_does_not_move_a_belief_all_the_way() -> None:
    truth = selene(efficiency=0.3)
    found = found_again(truth, ROWS[:1])

    [left] = [
        math.log(predict_step(row, found).seconds / predict_step(row, truth).seconds)
        for row in ROWS[:1]
    ]
    assert -0.02 < left < -0.001


def test_no_row_pushes_a_constant_out_of_its_range() -> None:
    rows = ROWS[:1]
    found, constants = fit_constants(
        selene(),
        lambda tried: [math.log(predict_step(row, tried).seconds / 1e9) for row in rows],
    )

    assert found.efficiency == pytest.approx(FITTABLE["efficiency"].least)
    assert all(each.least <= each.value <= each.most for each in constants)


def test_a_cluster_without_a_constant_is_fitted_without_it() -> None:
    _, constants = fit_constants(selene(traffic=None), lambda _: [0.0])

    assert [each.name for each in constants] == ["efficiency", "nic_efficiency"]
