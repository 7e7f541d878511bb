"""A surveyed model as a workload: its layers, its split, its state."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planner_cases import cluster
from support.surveys import KEPT, SURVEY, layer

from axsparse.models.survey import Survey
from axsparse.pipeline.schedules import Schedule
from axsparse.planner.layout import LayoutQuestion, Row
from axsparse.planner.layout_search import plan
from axsparse.planner.stage_memory import stage_memory
from axsparse.planner.surveyed_model import SurveyedModel
from axsparse.samo.state_bytes import StateFormat, stage_bytes

MODEL = SurveyedModel(
    name="four layers",
    survey=SURVEY,
    kept=KEPT,
    precision="bf16",
    gradient="fp32",
    moments=2,
    index="int32",
    checkpoint_activations=1,
)


def test_a_stage_is_the_sum_of_its_layers() -> None:
    loads = replace(MODEL, split=(1, 3)).stages(2, 1)
    assert loads is not None
    last = loads[1]

    assert last.layers == "b–d"
    assert loads[0].layers == "a"
    assert (last.flops, last.again_flops) == (9e3, 9e3)
    assert last.moved == last.again_moved == (700 + 30) + 2 * (100 + 30)
    assert last.trained == 400 + 200 + 100
    assert last.kept == 40 + 20 + 100
    assert last.temporary == 2 * 400
    assert (last.held, last.working) == (3 * 20 + 30, 700 + 2 * 50)
    assert (loads[0].logits, last.logits) == (0, 30 / 2 * 8)
    assert loads[0].outputs == 30


FROZEN = 7 * 2
"""Bytes of a layer's frozen vector."""


@pytest.mark.parametrize(
    ("buffer", "writers", "expected"),
    [
        (0, 1, 0),  # nothing is saved while training goes on, or elsewhere
        (1e6, 1, 12 * 160 + 3 * FROZEN),
        # A third, and c of 20 or d of 100 kept, whichever is dearer: whole layers are dealt.
        (1e6, 3, (12 * 160 + 3 * FROZEN) / 3 + 12 * 100 + FROZEN),
        (500, 1, 500 + 4 * 100),  # a tensor waits beside the buffer
    ],
)
def test_copies_for_a_checkpoint_are_what_a_rank_writes_or_what_the_buffer_lets_in(
    buffer: float, writers: int, expected: float
) -> None:
    loads = replace(MODEL, split=(1, 3), checkpoint_buffer=buffer).stages(2, writers)
    assert loads is not None

    assert loads[1].saved == pytest.approx(expected)


def test_more_replicas_have_less_to_save_each() -> None:
    model = replace(MODEL, checkpoint_buffer=1e6)
    alone, third = (model.stages(1, writers) for writers in (1, 3))
    assert alone is not None and third is not None

    assert third[0].saved < alone[0].saved


def test_a_tied_weight_is_saved_once() -> None:
    tied = replace(MODEL.survey, ties={"d.weight": "a.weight"})
    loads = replace(MODEL, survey=tied, split=(1, 3), checkpoint_buffer=1e6).stages(2, 1)
    assert loads is not None

    assert loads[1].saved == 12 * 60 + 3 * FROZEN


def test_only_every_kth_layer_is_computed_again() -> None:
    loads = replace(MODEL, split=(1, 3), checkpoint_activations=2).stages(2, 1)
    assert loads is not None

    assert loads[1].again_flops == 4e3 + 3e3  # b and d
    assert replace(MODEL, checkpoint_activations=0).sample_flops == 3 * 10e3
    assert MODEL.sample_flops == 4 * 10e3


@pytest.mark.parametrize("shards", [False, True])
def test_state_is_what_a_run_would_build(shards: bool) -> None:
    model = replace(MODEL, shard_optimizer=shards, split_master=True, index="mask")
    loads = model.stages(2, 3)
    assert loads is not None
    expected = stage_bytes(
        SURVEY.layers,
        {},
        KEPT,
        StateFormat(
            half=True,
            gradient_bytes=4,
            moments=2,
            index="mask",
            split_master=True,
            replicas=3 if shards else 1,
        ),
    )

    assert sum(load.state.total for load in loads) == expected.total


@pytest.mark.parametrize(("microbatches", "width"), [(8, 2), (9, 4)])
def test_auto_accumulates_in_the_precision_of_a_run(microbatches: int, width: int) -> None:
    loads = replace(MODEL, gradient="auto").stages(1, 1, microbatches=microbatches)
    assert loads is not None

    assert loads[0].state.gradient == width * (40 + 20 + 100 + 100)


def test_stages_are_balanced_by_work_unless_that_does_not_fit() -> None:
    free = MODEL.stages(2, 1)
    bounded = MODEL.stages(2, 1, lambda stage, load: stage == 1 or load.trained <= 100)

    assert free is not None and bounded is not None
    assert [load.layers for load in free] == ["a–b", "c–d"]
    assert [load.layers for load in bounded] == ["a", "b–d"]
    assert MODEL.stages(2, 1, lambda *_: False) is None
    assert replace(MODEL, split=(1, 3)).stages(2, 1, lambda *_: False) is None


def test_a_dense_model_compresses_nothing() -> None:
    assert MODEL.is_pruned
    assert not replace(MODEL, kept={}).is_pruned


def test_the_second_use_of_a_weight_is_kept_like_the_first() -> None:
    tied = Survey(SURVEY.layers, ties={"c.weight": "b.weight"})
    loads = replace(MODEL, survey=tied, kept={"b.weight": 40}, split=(1, 3)).stages(2, 1)
    assert loads is not None

    assert loads[1].kept == 40 + 40 + 100


def test_a_plan_moves_layers_off_a_stage_that_is_too_small() -> None:
    machine = cluster(peak_bf16=1e9, overhead_bytes=0.0)
    survey = Survey([*SURVEY.layers[:3], layer("d", 10, 2e5)], ties={})

    def planned(room: float, split: tuple[int, ...] | None = None) -> Row:
        return plan(
            LayoutQuestion(
                workload=replace(MODEL, survey=survey, split=split),
                cluster=machine,
                gpus=2,
                global_batch_size=4,
                schedule=Schedule("message-driven", 0, "alternate"),
                g_inter=[2],
                microbatch_sizes=[1],
                memory_bytes=room,
            )
        ).recommended

    by_work, by_hand = planned(1e9), planned(1e9, (2, 2))
    most, room = (max(stage.total for stage in row.memory) for row in (by_work, by_hand))
    assert room < most

    bounded = planned(room)

    assert [load.layers for load in by_work.loads] == ["a–c", "d"]
    assert [load.layers for load in bounded.loads] == ["a–b", "c–d"]
    assert bounded.memory == by_hand.memory


def test_the_loss_takes_the_logits_that_it_holds_at_a_time_on_the_last_stage() -> None:
    survey = replace(SURVEY, loss_logits=lambda samples: min(1000, 300 * samples))
    loads = replace(MODEL, survey=survey, split=(1, 3)).stages(2, 1)
    assert loads is not None

    assert [load.loss_bytes(2) for load in loads] == [0, 8 * 600]
    assert loads[1].loss_bytes(4) == 8 * 1000
    found = stage_memory(loads[1], microbatch_size=4, in_flight=1, overhead=0.0)
    assert found.logits == 4 * loads[1].logits + 8 * 1000
