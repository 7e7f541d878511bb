"""A profiled model: its layers, its split, its state, and drawing its masks."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.allocated import peak_of_torch
from support.hf import SMALL_LLAMA
from support.planner_cases import FOUR_LAYERS, KEPT, cluster, layer, profiled, unpruned
from support.runs import VOCABULARY, tiny_config, token_data, train_in_process
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.models.layer import Model
from axsparse.models.model_profile import ModelProfile, profile
from axsparse.models.zoo.model_registry import named_model
from axsparse.pipeline.policy import Schedule
from axsparse.planner.cluster import load_cluster
from axsparse.planner.layout_search import Candidate, SearchRequest, plan
from axsparse.planner.profiled_model import CUT_LOSS_BYTES, ProfiledModel
from axsparse.planner.stage_memory import StageLoad, stage_memory, value_bytes
from axsparse.planner.step_cost import step_costs
from axsparse.pruning.calibration import Calibration
from axsparse.pruning.criteria import Criterion, Score
from axsparse.pruning.targets import kept_at_start, what_is_pruned
from axsparse.runtime.communication import Sums
from axsparse.runtime.grid import Grid
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.precision import DTYPES
from axsparse.samo.state_bytes import StateFormat, WeightKind, stage_bytes

MODEL = profiled()
CLUSTER = load_cluster("dgx-h100")
CUT: dict[str, Any] = {"layout": {"split": [1, 3]}}
SAVING: dict[str, Any] = {"checkpoint": {"every": 1}}


def loads_of(
    stages: int, replicas: int = 1, microbatches: int = 1, **changes: Any
) -> list[StageLoad]:
    """The stages of the model with some changes."""
    loads = profiled(**changes).stages(stages, replicas, microbatches=microbatches)
    assert loads is not None
    return loads


def test_a_stage_is_the_sum_of_its_layers() -> None:
    loads = loads_of(2, **CUT)
    last = loads[1]

    assert last.layers == "b–d"
    assert loads[0].layers == "a"
    assert (last.flops, last.again_flops) == (9e3, 9e3)
    assert last.moved == last.again_moved == (700 + 30) + 2 * (100 + 30)
    assert last.trained == 400 + 200 + 100
    assert last.kept == 40 + 20 + 100
    assert last.temporary == 2 * 400
    assert (last.held, last.working) == (3 * 20 + 30, 700 + 2 * 50)
    assert (loads[0].loss_bytes(1), last.loss_bytes(1)) == (0, LOSS_INPUTS)
    assert loads[0].outputs == 30


@pytest.mark.parametrize(("on_host", "most"), [(True, 400 + 200), (False, 400)])
def test_freed_gradients_of_small_tensors_are_kept_beside_a_large_one(
    on_host: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axsparse.planner.profiled_model.LARGEST_KEPT", 2 * 200)
    loads = replace(profiled(**CUT), on_host=on_host).stages(2, 1, microbatches=1)

    assert loads is not None
    assert loads[1].temporary == 2 * most


LOSS_INPUTS = 30 / 2 * 8
"""Bytes that the loss takes for the last layer's outputs of a sample."""
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
    buffer: float, writers: int, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("axsparse.planner.profiled_model.STAGING_BYTES", buffer)
    loads = loads_of(2, writers, **CUT, checkpoint={"every": int(buffer > 0)})

    assert loads[1].saved == pytest.approx(expected)


def test_more_replicas_have_less_to_save_each_and_a_tied_weight_is_saved_once() -> None:
    (alone,), (third,) = (loads_of(1, writers, **SAVING) for writers in (1, 3))
    tied = replace(MODEL.profile, ties={"d.weight": "a.weight"})

    assert third.saved < alone.saved
    loads = loads_of(2, profile=tied, **CUT, **SAVING)
    assert loads[1].saved == 12 * 60 + 3 * FROZEN
    loads = loads_of(2, profile=replace(tied, start="values in fp32"), **CUT, **SAVING)
    assert loads[1].saved == 12 * 60 + 3 * 2 * FROZEN


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_is_what_a_run_would_build(stage: int) -> None:
    weights: WeightKind = "sparse" if stage == 3 else "dense"
    samo = {"zero_stage": stage, "index": "mask", "weights": weights}
    loads = loads_of(1 if stage == 3 else 2, 3, samo=samo)
    expected = stage_bytes(
        FOUR_LAYERS.layers,
        {},
        KEPT,
        StateFormat(
            torch.bfloat16,
            torch.float32,
            ADAMW.moments,
            index="mask",
            replicas=3 if stage else 1,
            weights=weights,
            gathers=stage == 3,
        ),
    )

    assert sum(load.state.total for load in loads) == expected.total
    # A layer without anything pruned is not gathered.
    assert (sum(load.gathered for load in loads) > 0) is (stage == 3)
    assert all(load.gathered < 2 * load.kept for load in loads)


@pytest.mark.parametrize(("microbatches", "width"), [(8, 2), (9, 4)])
def test_auto_accumulates_in_the_precision_of_a_run(microbatches: int, width: int) -> None:
    loads = loads_of(1, microbatches=microbatches, samo={"gradient": "auto"})

    assert loads[0].state.gradient == width * (40 + 20 + 100 + 100)


def test_exact_sums_take_eight_bytes_an_entry_in_memory_and_on_the_wire() -> None:
    exact = loads_of(1, microbatches=8, samo={"gradient": "exact"})[0]
    half = loads_of(1, microbatches=8)[0]
    seconds = [
        step_costs(MODEL, [load], CLUSTER, Grid(1, 2), 1).all_reduce[0] for load in (half, exact)
    ]
    assert CLUSTER.node_ring_latency is not None
    hops = 2 * CLUSTER.node_ring_latency

    assert exact.state.gradient == 8 * (40 + 20 + 100 + 100)
    assert seconds[1] - hops == pytest.approx(
        8 / value_bytes(MODEL.precision) * (seconds[0] - hops)
    )


def test_stages_are_balanced_by_work_unless_that_does_not_fit() -> None:
    free = MODEL.stages(2, 1)
    bounded = MODEL.stages(2, 1, lambda stage, load: stage == 1 or load.trained <= 100)

    assert free is not None and bounded is not None
    assert [load.layers for load in free] == ["a–b", "c–d"]
    assert [load.layers for load in bounded] == ["a", "b–d"]
    assert MODEL.stages(2, 1, lambda *_: False) is None
    assert profiled(**CUT).stages(2, 1, lambda *_: False) is None


def test_the_second_use_of_a_weight_is_kept_like_the_first_and_a_dense_model_is_not_pruned() -> (
    None
):
    tied = ModelProfile(FOUR_LAYERS.layers, ties={"c.weight": "b.weight"})
    loads = loads_of(2, profile=tied, kept={"b.weight": 40}, **CUT)

    assert loads[1].kept == 40 + 40 + 100
    assert MODEL.is_pruned
    assert not profiled(kept={}).is_pruned


def test_a_plan_moves_layers_off_a_stage_that_is_too_small() -> None:
    machine = cluster(peak_bf16=1e9, overhead_bytes=0.0)
    heavy = ModelProfile([*FOUR_LAYERS.layers[:3], layer("d", 10, 2e5)], ties={})

    def planned(rank_budget: float, split: object = "auto") -> Candidate:
        return plan(
            SearchRequest(
                model=profiled(heavy, layout={"split": split}),
                cluster=machine,
                gpus=2,
                global_batch_size=4,
                schedules=[Schedule("message-driven", 0)],
                g_inter=[2],
                microbatch_sizes=[1],
                rank_budget=rank_budget,
            )
        ).recommended

    by_work, by_hand = planned(1e9), planned(1e9, [2, 2])
    most, rank_budget = by_work.most_bytes, by_hand.most_bytes
    assert rank_budget < most

    bounded = planned(rank_budget)

    assert [load.layers for load in by_work.loads] == ["a–c", "d"]
    assert [load.layers for load in bounded.loads] == ["a–b", "c–d"]
    assert bounded.memory == by_hand.memory


def test_the_loss_takes_the_logits_that_it_holds_at_a_time_on_the_last_stage() -> None:
    chunked = replace(FOUR_LAYERS, loss_logits=lambda samples: min(1000, 300 * samples))
    loads = loads_of(2, profile=chunked, **CUT)

    assert [load.loss_bytes(2) for load in loads] == [0, 2 * LOSS_INPUTS + 8 * 600]
    found = stage_memory(loads[1], microbatch_size=4, in_flight=1, overhead=0.0)
    assert found.logits == 4 * LOSS_INPUTS + 8 * 1000


# -- tensor-parallel ranks
# ----------------------------------------------------------------------------------


def gpt_of(g_tensor: int, **sections: Any) -> tuple[StageLoad, StageLoad]:
    """A GPT in one stage, in full and as one of N tensor-parallel ranks has it."""
    asked = tiny_config(
        **{"model": {"num_heads": 4, "tie_embeddings": False}, "samo": {"enabled": False}},
        **{"precision": "bf16", "checkpoint": {"every": 1}, **sections},
    )
    planned_model = unpruned(asked)
    loads = [each.stages(1, 1) for each in (planned_model, planned_model.tp_shard(g_tensor))]
    assert loads[0] is not None and loads[1] is not None
    return loads[0][0], loads[1][0]


@pytest.mark.parametrize("g_tensor", [2, 4])
@pytest.mark.parametrize("every", [0, 1])
def test_a_member_computes_its_part_and_sums_what_is_between_layers(
    g_tensor: int, every: int
) -> None:
    whole, load = gpt_of(g_tensor, pipeline={"checkpoint_activations": every})
    blocks, tokens, hidden, words = 2, 12, 32, VOCABULARY
    activation, logits = 2 * tokens * hidden, 4 * tokens

    # Products are sharded. Those of the head count as its parameters, of which the norm is full.
    assert load.flops == pytest.approx(whole.flops / g_tensor, rel=1e-2)
    # Norms, positions and the biases of rowwise modules are on all members.
    on_all = blocks * (4 + 2) * hidden + (2 + tokens) * hidden
    assert load.trained == (whole.trained - on_all) / g_tensor + on_all
    assert load.state.total == pytest.approx((whole.state.total / whole.trained) * load.trained)
    # Two rowwise modules a block and the embedding are summed. The loss sums one number a token in
    # fp32, and gathers one of each member.
    sent = (g_tensor - 1) / g_tensor
    summed = 2 * sent * ((2 * blocks + 1) * activation + logits) + (g_tensor - 1) * logits
    assert load.forward_sums == Sums(round(summed), 2 * blocks + 1 + 2)
    # Gradients of what colwise modules and the loss get are summed. What is computed again ends
    # before the last of its two sums.
    sums = 2 * blocks + 1 + (every > 0) * blocks
    assert load.backward_sums == Sums(round(2 * sent * sums * activation), sums)
    inputs = load.outputs / 2 * 8
    assert load.loss_bytes(2) == 2 * inputs + CUT_LOSS_BYTES * 2 * tokens * words / g_tensor
    # Of recomputed blocks the inputs are held, which all tensor-parallel ranks have.
    assert load.held == whole.held if every else load.held < whole.held
    assert load.outputs == whole.outputs
    # One tensor-parallel rank saves full tensors, which all of them gather.
    assert load.saved == whole.saved > 0
    assert load.building == 12 / 4 * whole.building


def test_shards_keep_equal_parts_of_a_pruned_tensor() -> None:
    kept = {"block0.fc1.weight": 1001, "block0.fc2.weight": 1002}
    planned_model = replace(unpruned(tiny_config(model={"num_heads": 4})), kept=kept)

    found = planned_model.tp_shard(2)

    assert found.kept == {"block0.fc1.weight#1": 501, "block0.fc2.weight#1": 501}
    assert found.full is planned_model
    assert planned_model.tp_shard(1) is planned_model


# -- calibration ----------------------------------------------------------------------------


SAMPLES = 24
EXPERTS = {"model_type": "mixtral", "num_local_experts": 4}


def config(
    method: str,
    precision: str,
    samples: int = SAMPLES,
    width: int = 96,
    heal: str = "none",
    **others: Any,
) -> Config:
    sizes = {"hidden_size": width, "intermediate_size": 264 * width // 96, **others}
    return tiny_config(
        model={**SMALL_LLAMA, "hf": {**SMALL_LLAMA["hf"], **sizes}},
        pruning={"method": method, "sparsity": 0.6, "calibration_samples": samples, "heal": heal},
        batch={"global_batch_size": 4, "microbatch_size": 2},
        train={"steps": 1},
        precision=precision,
    )


class RandomStart:
    """Start values of every parameter, made anew whenever they are read."""

    fingerprint = "random"

    def __init__(self, model: Model) -> None:
        self.shapes = profile(replace(model, example=None)).shapes

    def read(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(len(name))
        return torch.randn(self.shapes[name], generator=generator).div_(10)


def peaks_of(owner: type, method: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that torch takes in each call of a method from now on."""
    peaks: list[int] = []
    own = getattr(owner, method)

    def measured(*arguments: Any, **more: Any) -> Any:
        found: list[Any] = []
        gc.disable()  # layers that wait for the collector count
        try:
            peaks.append(peak_of_torch(lambda: found.append(own(*arguments, **more))))
        finally:
            gc.enable()
        return found[0]

    monkeypatch.setattr(owner, method, measured)
    return peaks


def never(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("method", "precision", "width", "least", "score", "others"),
    [
        ("wanda", "fp32", 96, 0.9, None, {}),
        pytest.param("sparsegpt", "bf16", 96, 0.9, None, {}, marks=pytest.mark.exhaustive),
        pytest.param("wanda", "fp32", 96, 0.8, None, EXPERTS, marks=pytest.mark.exhaustive),
        pytest.param("sparsegpt", "bf16", 96, 0.8, None, EXPERTS, marks=pytest.mark.exhaustive),
        # Nobody knows what a function of one's own takes: as much as Wanda is planned. The model is
        # so wide that the 2 MB of histograms by which its scores are selected do not count.
        ("custom", "fp32", 480, 0.7, lambda name, weight, inputs: weight.abs() * inputs, {}),
        # Healing is planned for steps of several microbatches, whose gradients are added.
        ("magnitude", "fp32", 96, 0.5, None, {"heal": "blocks"}),
        # The last block is the fullest, and behind it lies a head of so many words.
        pytest.param(
            *("magnitude", "bf16", 96, 0.8, None, {"heal": "blocks", "vocab_size": 16384}),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_drawing_masks_takes_what_torchs_allocator_counts(
    method: str,
    precision: str,
    width: int,
    least: float,
    score: Score | None,
    others: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = config(method, precision, width=width, **others)
    model = named_model(asked)
    # As with weights of a file, nothing is drawn: a layer with an `init` is built without memory.
    layers = [replace(layer, init=never) for layer in model.layers]
    model = replace(model, start=RandomStart(model), layers=layers)
    info = profile(model, DTYPES[asked.precision])
    kept = kept_at_start(asked, what_is_pruned(asked, info))
    planned_model = ProfiledModel(asked, info, kept, ADAMW, sees_inputs=score is not None)
    loads = planned_model.stages(1, 1)
    assert loads is not None
    peaks = peaks_of(Calibration, "draw", monkeypatch)
    train_in_process(1, 1, model, asked, token_data(), score=score)

    planned = loads[0].calibration(2)
    assert least * planned < peaks[0] < planned


def test_the_stage_of_the_last_pruned_layer_builds_those_behind_it() -> None:
    asked = config("magnitude", "bf16", heal="blocks")
    asked = asked.with_values({"layout.split": (1, 1, 1, 2)})
    info = profile(named_model(asked), torch.bfloat16)
    assert [layer.kind for layer in info.layers[1:3]] == ["block", "block"]
    kept = kept_at_start(asked, what_is_pruned(asked, info))

    loads = ProfiledModel(asked, info, kept, ADAMW).stages(4, 1)

    assert loads is not None
    assert loads[1].state == loads[2].state
    assert loads[1].calibration(2) < loads[2].calibration(2)


@pytest.mark.parametrize(
    ("method", "score", "least"),
    [
        pytest.param(
            *("custom", lambda name, weight, gradient: (weight * gradient).abs(), 0.8),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param("snip", None, 0.6, marks=pytest.mark.exhaustive),
    ],
)
def test_scoring_by_gradients_takes_what_is_planned(
    method: str, score: Score | None, least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(method, "fp32", width=960)
    asked = asked.with_values({"train.steps": 2, "pruning.at_step": 1})
    model = named_model(asked)
    info = profile(model, DTYPES[asked.precision])
    loads = ProfiledModel(asked, info, {}, ADAMW, sees_gradients=score is not None).stages(1, 1)
    assert loads is not None
    peaks = peaks_of(Criterion, "mask", monkeypatch)
    train_in_process(1, 1, model, asked, token_data(), score=score)

    assert least * loads[0].building < max(peaks) < loads[0].building
