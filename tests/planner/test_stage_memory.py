"""Bytes of a stage: its activations, and all it needs of a device."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
from support.action_text import peak_in_flight as held_of
from support.action_text import uniform_durations
from support.planner_cases import load_of

from axsparse.models.layer_cost import Activations
from axsparse.models.model_profile import LayerInfo
from axsparse.pipeline.policy import Policy, Schedule, ScheduleName
from axsparse.pipeline.simulator import MessageCost, simulate
from axsparse.planner.layout_search import Layout
from axsparse.planner.stage_memory import (
    StageLoad,
    activation_memory,
    gigabytes,
    most_in_flight,
    needed,
    peak_in_flight,
    stage_memory,
)
from axsparse.runtime.grid import Grid
from axsparse.samo.state_bytes import StateBytes

LAYERS = [
    LayerInfo("a", "block", (), 1.0, activations=Activations(10, 100, 20, 60)),
    LayerInfo("b", "block", (), 1.0, activations=Activations(20, 300, 30, 40)),
    LayerInfo("c", "block", (), 1.0, activations=Activations(30, 200, 40, 90)),
]


@pytest.mark.parametrize(
    ("every", "kept", "working"),
    [
        (0, 10 + 100 + 20 + 300 + 30 + 200 + 40, 2 * 90),
        (1, 10 + 20 + 30 + 40, max(300 + 2 * 40, 200 + 2 * 90)),
        (2, 10 + 20 + 300 + 30 + 40, 200 + 2 * 90),
    ],
)
def test_a_backward_needs_room_for_two_gradients_and_for_what_it_computes_again(
    every: int, kept: int, working: int
) -> None:
    assert activation_memory(LAYERS, every) == (kept, working, 0)
    without_example = [LayerInfo("a", "block", (), 1.0)]
    assert activation_memory(without_example, every) == (0, 0, 0)


def split(saved: int, deferred: int) -> LayerInfo:
    return LayerInfo(
        "s", "block", (), 1.0, activations=Activations(10, saved, 10, 10, deferred=deferred)
    )


@pytest.mark.parametrize(
    ("layers", "deferred"),
    [
        ([split(100, 60), split(200, 130)], 190),
        # The last layer has left its 150 while the first one still holds its 10 and 500.
        ([split(500, 20), split(50, 150)], 510 + 150),
    ],
)
def test_what_is_deferred_piles_up_while_a_backward_frees_what_it_used(
    layers: list[LayerInfo], deferred: int
) -> None:
    held, _, found = activation_memory(layers, 0)

    saved = sum(10 + each.activations.saved for each in layers if each.activations)
    assert (held, found) == (saved + 10, deferred)


HOLDING = {
    "state": StateBytes(weight=1, index=2, gradient=3, master=4, optimizer=5),
    **{"held": 10.0, "working": 100.0, "loss_bytes": lambda samples: 1000.0 * samples},
}


def test_a_stage_needs_state_activations_and_what_is_there_anyway() -> None:
    load = load_of(**HOLDING, temporary=10_000.0, building=12_259.0)

    found = stage_memory(load, microbatch_size=2, in_flight=3, overhead=100_000.0)

    parts = [found.weight, found.index, found.gradient, found.master, found.optimizer]
    assert parts == [1, 2, 3, 4, 5]
    assert (found.activations, found.working, found.logits) == (2 * 3 * 10, 2 * 100, 2 * 1000)
    assert found.total == 15 + 60 + 200 + 2000 + 10_000 + 100_000


@pytest.mark.parametrize(
    ("load", "total"),
    [
        # A tensor may take more to make than to train.
        (load_of(**HOLDING, temporary=10_000.0, building=50_000.0), 15 + 50_000),
        # Drawing masks may take more than all of training.
        (
            load_of(**HOLDING, temporary=10_000.0, calibration=lambda samples: 45_000.0 * samples),
            90_000,
        ),
        # Copies for a checkpoint come on top while training goes on.
        (load_of(**HOLDING, building=50_000.0, saved=700.0), 15 + 50_000 + 700),
    ],
)
def test_the_peak_is_the_worst_moment(load: StageLoad, total: float) -> None:
    assert stage_memory(load, microbatch_size=2, in_flight=3, overhead=7.0).total == total + 7


def policy_of(schedule: Schedule, g_inter: int, microbatches: int, stage: int) -> Policy:
    return schedule.policy(stage=stage, g_inter=g_inter, microbatches=microbatches)


@pytest.mark.parametrize("name", get_args(ScheduleName))
@pytest.mark.parametrize("size", [None, 0.5, 1.0, 3.5])
def test_a_stage_never_holds_more_than_is_counted(name: ScheduleName, size: float | None) -> None:
    """`size` is that of a deferred microbatch; None: backwards are not split."""
    for g_inter, microbatches, extra_in_flight in itertools.product((1, 2, 4), (1, 3, 12), (0, 2)):
        schedule = Schedule(name, extra_in_flight, split_backward=size is not None)
        # Slow backwards fill every stage.
        for backward, weight in ((50, 0.0),) if size is None else ((5, 0.1), (5, 50.0)):
            run = simulate(
                partial(policy_of, schedule, g_inter, microbatches),
                uniform_durations(g_inter, microbatches, 1, backward, weight),
                [MessageCost()] * (g_inter - 1),
            )
            for stage, done in enumerate(run.stages):
                place = {"stage": stage, "g_inter": g_inter, "microbatches": microbatches}
                counted = peak_in_flight(schedule, size=size or 1.0, **place)
                held = held_of(done.actions, size or 0.0)
                assert held <= counted + 1e-9
                if size is None:
                    assert counted == most_in_flight(schedule, **place)
                    assert held == counted or not (stage == 0 and g_inter > 1)
                    assert counted == 1 or stage < g_inter - 1 or name == "gpipe"


def test_what_waits_for_weight_gradients_counts_by_its_own_bytes() -> None:
    # Two stages, extra_in_flight 0: two in flight and two deferred of half size, and one and one.
    layout = Layout(Grid(2, 1), Schedule("message-driven", 0, split_backward=True), 3, 8)
    load = load_of(**HOLDING, deferred=5.0)

    found = [layout.stage_memory(stage, load, 0.0).activations for stage in range(2)]

    assert found == [3 * 3 * 10, 3 * 1.5 * 10]
    whole = replace(layout, schedule=Schedule("message-driven", 0))
    assert whole.stage_memory(1, load, 0.0).activations == 3 * 10


@pytest.mark.parametrize(
    ("need", "rank_budget", "text"),
    [
        (18.24e9, 16e9, "18.2 GB of 16.0"),
        (17.184e9, 17.18e9, "17.184 GB of 17.180"),
        (3.2e6, 3e6, "0.0032 GB of 0.0030"),
    ],
)
def test_a_need_is_told_apart_from_the_room(need: float, rank_budget: float, text: str) -> None:
    assert needed(need, rank_budget) == text
    assert gigabytes(12.34e9) == "12.3"
    assert gigabytes(1_234_000) == "0.0012"
