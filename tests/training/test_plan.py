"""Every `auto` decided, what a transport or a grid cannot run refused, and an odd rank named."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.local_world import LocalWorld, WorldTransport
from support.runs import mlp, on_ranks, tiny_config, tiny_gpt, with_layout

import axsparse
from axsparse.config.load import configure, to_yaml
from axsparse.config.schema import Config
from axsparse.config.validate import check_config
from axsparse.models.model_profile import profile
from axsparse.planner.stage_memory import MemoryBudget
from axsparse.pruning.targets import find_targets
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.samo.precision import DTYPES
from axsparse.training import plan
from axsparse.training.plan import RunPlan, parameter_groups, plan_run, reject_mismatching_rank


def transport(ranks: int = 1, name: str = "local") -> Transport:
    made = WorldTransport(LocalWorld(ranks), 0)
    made.name = name
    return made


def decided(config: Config, on: Transport, grid: Grid | None = None, **inputs: Any) -> RunPlan:
    config = config if grid is None else with_layout(config, grid)
    model = tiny_gpt(config)
    profiled = profile(model, DTYPES[config.precision])
    return plan_run(config.with_origins("test", {}), model, profiled, on, **inputs)


def resolved(config: Config, ranks: int = 1, grid: Grid | None = None) -> RunPlan:
    return decided(config, transport(ranks), grid)


@pytest.mark.parametrize(
    ("microbatch_size", "ranks", "gradient"), [(1, 1, "fp32"), (2, 1, "half"), (1, 4, "half")]
)
def test_auto_accumulates_in_half_up_to_eight_microbatches_a_replica(
    microbatch_size: int, ranks: int, gradient: str
) -> None:
    batch = {"global_batch_size": 12, "microbatch_size": microbatch_size}
    config = tiny_config(precision="bf16", batch=batch, layout={"g_inter": 1})

    run = resolved(config, ranks)

    assert run.config.samo.gradient == gradient
    assert run.state_format.gradient is (torch.bfloat16 if gradient == "half" else torch.float32)


@pytest.mark.parametrize(("stages", "shared"), [(1, True), (2, False)])
def test_auto_shares_the_optimizer_state_where_a_rank_has_less_by_it(
    stages: int, shared: bool
) -> None:
    run = resolved(tiny_config(samo={"zero_stage": "auto"}, layout={"g_inter": stages}), 2)

    assert run.config.samo.zero_stage == int(shared)
    whole = resolved(tiny_config(layout={"g_inter": stages}), 2)
    there, alone = (
        each.state_bytes(each.layers_of(0), each.kept_at_start) for each in (run, whole)
    )
    assert (there < alone) is shared


@pytest.mark.parametrize("layout", [{}, {"g_inter": 1}, {"split": [2, 2]}])
def test_auto_keeps_weights_dense_where_that_fits(layout: dict[str, Any]) -> None:
    settings = {
        "precision": "bf16",
        "pruning": {"include": "all", "sparsity": 0.9},
        "pipeline": {"extra_in_flight": 0},
    }
    ranks = len(layout.get("split", [1]))
    needs = {}
    for weights in ("dense", "sparse"):
        config = tiny_config(**settings, samo={"weights": weights}, layout=layout)
        prediction = resolved(config, ranks).prediction
        assert prediction is not None
        needs[weights] = prediction.memory_bytes
    assert needs["sparse"] < needs["dense"]

    config = tiny_config(**settings, samo={"weights": "auto"}, layout=layout)
    between = (needs["sparse"] + needs["dense"]) / 2
    for nbytes, weights in ((needs["dense"] / 0.8, "dense"), (between, "sparse")):
        budget = MemoryBudget(nbytes, 0.0)
        run = decided(config, transport(ranks), budget=budget)
        assert (run.config.samo.weights, run.state_format.weights) == (weights, weights)
        assert run.has_sparse_weights is (weights == "sparse")
        assert run.prediction is not None
        assert run.prediction.memory_bytes <= nbytes
    assert resolved(config, ranks).config.samo.weights == "dense", "nothing limits it"


def test_rates_go_by_density_but_those_that_are_named() -> None:
    config = tiny_config(
        pruning={"sparsity": 0.75, "rate_power": 0.5},
        optimizer={"learning_rate": 1e-3, "learning_rates": ["block0.fc1.weight=0.5"]},
    )

    rates = {name: group.peak for name, group in resolved(config).groups.items()}

    assert rates.pop("block0.fc1.weight") == 0.5
    assert rates.keys() >= {"block0.fc2.weight", "block1.attention.qkv.weight"}
    assert not any("bias" in name or "embed" in name for name in rates)
    assert list(rates.values()) == pytest.approx([2e-3] * len(rates))


def test_a_tensor_that_keeps_no_entry_has_no_rate_by_its_density() -> None:
    config = tiny_config(pruning={"sparsity": 0.99, "include": "all", "rate_power": 1.0})
    profiled = profile(mlp(width=4, classes=3))
    targets = find_targets(profiled, config.pruning)

    groups = parameter_groups(config, profiled, targets)

    kept = targets.kept()
    assert not all(kept.values())
    assert groups.keys() == {name for name, left in kept.items() if left}


def test_the_last_entry_that_names_both_names_of_a_tied_weight_counts() -> None:
    rates = ["embed.token.weight=0.1", "head.weight=0.2", "*.weight=0.05"]

    groups = resolved(tiny_config(optimizer={"learning_rates": rates})).groups

    assert groups["embed.token.weight"].peak == groups["head.weight"].peak == 0.05


def test_auto_splits_backwards_where_there_are_several_stages() -> None:
    configs = [resolved(tiny_config(layout={"g_inter": g}), g).config for g in (1, 2)]

    assert [config.pipeline.split_backward for config in configs] == [False, True]


def test_what_is_asked_for_is_done() -> None:
    """But fp32 training accumulates in fp32."""
    for stage in (0, 1):
        config = tiny_config(samo={"zero_stage": stage}, layout={"g_inter": 1})
        assert resolved(config, 2).config.samo.zero_stage == stage
    assert resolved(tiny_config(samo={"gradient": "half"})).state_format.gradient is torch.float32


@pytest.mark.parametrize(
    ("sections", "ranks"),
    [
        ({"schedule": {"warmup_steps": 20}}, 1),
        ({"schedule": {"warmup_steps": 20, "decay": "constant"}, "train": {"steps": 1}}, 2),
        *(
            ({"pruning": {"method": method, "interval": 1}}, 1)
            for method in ("gradual", "iterative", "snip")
        ),
        ({"pruning": {"method": "early-bird", "interval": 1}, "train": {"steps": 20}}, 1),
        ({"pruning": {"at_step": 7}}, 1),
        ({"pruning": {"method": "gradual", "at_step": 2, "interval": 1}}, 4),
        ({"precision": "fp16", "samo": {"enabled": False}}, 2),
    ],
)
def test_a_run_s_own_settings_can_be_read_and_run_again(
    sections: dict[str, Any], ranks: int, tmp_path: Path
) -> None:
    config = resolved(tiny_config(**sections), ranks).config
    (tmp_path / "config.yaml").write_text(to_yaml(config))

    loaded = configure(str(tmp_path / "config.yaml"))
    check_config(loaded)

    assert decided(loaded, transport(ranks)).config == config


def test_a_single_rank_of_mpi_may_ask_for_local_and_on_a_gpu_for_nccl() -> None:
    one = transport(1, "mpi (some)")

    assert decided(tiny_config(transport="local"), one).config.transport == "local"
    nccl = tiny_config(transport="nccl")
    assert decided(nccl, one, on_host=False).config.transport == "nccl"
    with pytest.raises(ConfigError, match="nccl is for GPUs, and no rank sees one"):
        decided(nccl, one)


def auto(
    ranks: int = 4, limit: float | str = "auto", found: float | None = None, **sections: Any
) -> RunPlan:
    layout = {"memory_per_rank": limit, **sections.pop("layout", {})}
    config = tiny_config(layout=layout, **sections)
    if found is None:
        found = math.inf if isinstance(limit, str) else limit * 1e9
    return decided(config, transport(ranks), budget=MemoryBudget(found, 0.0))


def limited(limit: float | str, **sections: Any) -> RunPlan:
    deep: dict[str, Any] = {
        "model": {"num_layers": 8},
        "pruning": {"sparsity": 0.9},
        "layout": {"g_inter": 4},
    }
    pipeline = {"split_backward": False, **sections.pop("pipeline", {})}
    return auto(4, limit, precision="bf16", pipeline=pipeline, **deep, **sections)


def test_stages_that_are_asked_for_in_a_limited_memory_have_the_slack_of_their_plan() -> None:
    """So that a layout which a plan finds to fit is not refused."""
    asked: dict[str, Any] = {"model": {"num_layers": 6}, "layout": {"split": [2, 2, 2, 2]}}
    roomy = auto(limit=1, **asked)
    assert roomy.prediction is not None

    tight = auto(limit=roomy.prediction.memory_bytes / 1e9, **asked)

    assert (roomy.config.pipeline.extra_in_flight, tight.config.pipeline.extra_in_flight) == (1, 0)
    assert tight.layout_reason is None
    assert auto(found=1e3, **asked).config.pipeline.extra_in_flight == 1


@pytest.mark.parametrize(("times", "is_tight"), [(1.2, True), (2.0, False)])
def test_memory_that_was_found_is_tight_where_freed_blocks_would_not_fit(
    times: float, is_tight: bool
) -> None:
    usual = auto(layout={"g_inter": 2})
    assert usual.prediction is not None
    assert not usual.memory_is_tight

    run = auto(layout={"g_inter": 2}, found=times * usual.prediction.memory_bytes)

    assert run.memory_is_tight is is_tight


def test_a_limit_of_memory_counts_what_a_member_has() -> None:
    """Two tensor-parallel ranks need half of most, so that fewer stages fit; all ranks are used."""
    deep: dict[str, Any] = {"model": {"num_layers": 10}, "samo": {"enabled": False}}
    alone, shared = (
        auto(4, 1.0, layout={"g_inter": 1, "g_tensor": g_tensor}, **deep) for g_tensor in (1, 2)
    )
    assert alone.prediction is not None and shared.prediction is not None
    need = shared.prediction.memory_bytes
    assert 0.4 < need / alone.prediction.memory_bytes < 0.7
    assert (alone.prediction.sum_bytes, shared.prediction.sum_bytes > 0) == (0, True)

    fitting, tight = (
        auto(4, part * need / 1e9, layout={"g_tensor": 2}, **deep) for part in (1.3, 0.9)
    )

    assert fitting.coords.grid == Grid(1, 2, 2)
    assert tight.coords.grid == Grid(2, 1, 2)
    assert "; with 1, stage 0 needs " in str(tight.layout_reason)
    assert auto(3, 1.0, layout={"g_inter": 3}, **deep).coords.grid == Grid(3, 1)
    with pytest.raises(ConfigError, match=r"layout.g_tensor .*: 2 does not divide the 3 ranks"):
        auto(3, 1.0, layout={"g_tensor": 2})


def test_memory_for_calibration_is_predicted_until_a_run_has_its_masks() -> None:
    def predicted(method: str, samples: int, **inputs: Any) -> float:
        pruning = {"method": method, "calibration_samples": samples}
        run = decided(tiny_config(pruning=pruning), transport(), **inputs)
        assert run.prediction is not None
        return run.prediction.memory_bytes

    kept = {"block0.fc1.weight": 100}
    few, many, resumed = (
        predicted("wanda", 10),
        predicted("wanda", 10_000),
        predicted("wanda", 10_000, saved=kept),
    )

    # The activations of a sample are 12 tokens of width 32 in fp32.
    assert many > 10_000 * 12 * 32 * 4 > few
    assert resumed == predicted("magnitude", 10, saved=kept)
    by_inputs: Any = lambda name, weight, inputs: weight * inputs  # noqa: E731
    assert predicted("custom", 10_000, score=by_inputs) == many
    assert predicted("custom", 10_000, score=by_inputs, saved=kept) == resumed


@pytest.mark.parametrize(
    ("limit", "sections", "layers"),
    [
        ("auto", {}, [3, 2, 2, 3]),
        (2.5e-4, {"pipeline": {"checkpoint_activations": 1}}, [3, 2, 2, 3]),
        (2.5e-4, {"batch": {"global_batch_size": 1}}, [3, 2, 2, 3]),
        (3.2e-4, {"pipeline": {"extra_in_flight": 0}}, [3, 2, 2, 3]),
        # Stage 0 holds most activations, the last stage those of one microbatch.
        (3e-4, {"pipeline": {"extra_in_flight": 1}}, [2, 2, 2, 4]),
    ],
    ids=str,
)
def test_work_is_balanced_unless_memory_moves_layers(
    limit: float | str, sections: dict[str, Any], layers: list[int]
) -> None:
    assert [len(stage) for stage in limited(limit, **sections).stages] == layers


# -- torch.compile ----------------------------------------------------------------------------

WIDE = {"name": "gpt", "num_layers": 1, "num_heads": 8, "hidden_size": 2048, "vocab_size": 256}


@pytest.mark.parametrize(
    ("changes", "inputs", "expected"),
    [
        ({}, {}, True),
        ({"batch": {"global_batch_size": 32, "microbatch_size": 1}}, {}, "loss"),
        ({"model": {**WIDE, "hidden_size": 512, "sequence_length": 1024}}, {}, False),
        ({}, {"on_host": True}, False),
        ({"pipeline": {"split_backward": True}}, {}, False),
        ({"pipeline": {"compile": False}}, {}, False),
    ],
)
def test_auto_fuses_large_microbatches_of_our_own_decoder_on_a_gpu(
    changes: dict[str, Any],
    inputs: dict[str, Any],
    expected: bool | str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "has_compiler", lambda: True)
    batch = {"global_batch_size": 32, "microbatch_size": 8}
    sections = {"model": {**WIDE, "sequence_length": 1024}, "batch": batch, **changes}
    config = tiny_config(**sections)

    run = decided(config, transport(), **{"on_host": False, **inputs})

    assert run.config.pipeline.compile == expected


# -- precision ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "lacking", "on_host", "decided", "said"),
    [
        ("auto", [], True, "bf16", ""),
        ("auto", [torch.float16], True, "bf16", ""),
        ("auto", [torch.bfloat16], False, "bf16", ""),
        ("auto", [torch.bfloat16], True, "fp32", "precision auto: fp32, since a CPU has no"),
        ("bf16", [torch.bfloat16], True, "bf16", "warning: precision bf16: a CPU has no"),
        ("fp32", [torch.bfloat16], True, "fp32", ""),
    ],
)
def test_without_a_precision_cpus_that_lack_bf16_train_in_fp32_and_a_line_says_so(
    asked: str,
    lacking: list[torch.dtype],
    on_host: bool,
    decided: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "cpu_multiplies", lambda dtype: dtype not in lacking)
    given = tiny_config(precision=asked).with_origins("test", {})
    transport = LocalTransport()

    found, lines = plan.decided_precision(given, transport, on_host=on_host)

    assert found.precision == decided
    assert [line[: len(said)] for line in lines] == [said] * bool(said)


def test_all_ranks_train_in_one_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = iter([True, False])  # with and without bf16
    monkeypatch.setattr(plan, "cpu_multiplies", lambda dtype: next(hosts))
    given = tiny_config(precision="auto").with_origins("test", {})

    def body(transport: Transport) -> str:
        return plan.decided_precision(given, transport, on_host=True)[0].precision

    assert on_ranks(2, body) == ["fp32", "fp32"]


# -- the same on all ranks ----------------------------------------------------------------------


def test_facts_hold_every_version_every_setting_and_every_layer() -> None:
    config = tiny_config()

    facts = decided(config, transport()).facts

    assert facts["torch"] == torch.__version__
    assert facts["axsparse"] == axsparse.__version__
    assert facts["batch.global_batch_size"] == "12"
    assert facts["precision"] == "fp32"
    assert "block1.fc1.weight" in facts["layer block1"]
    assert facts["ties"] == "{'head.weight': 'embed.token.weight'}"
    leaves = sum(
        len(value) if isinstance(value, dict) else 1 for value in config.model_dump().values()
    )
    assert facts["start values"] == "drawn from the seed"
    assert facts["teacher"] == "none"
    assert len(facts) == 5 + leaves + 4 + 3 + 2


def refusals(facts: Mapping[int, Mapping[str, str]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The error of each rank about these facts; rank n runs on host n."""

    def body(transport: Transport) -> str:
        monkeypatch.setattr(socket, "gethostname", lambda: f"host{transport.rank}")
        try:
            reject_mismatching_rank(transport, facts[transport.rank])
        except ConfigError as error:
            return str(error)
        return ""

    return on_ranks(len(facts), body)


@pytest.mark.parametrize(
    ("fact", "values", "said"),
    [
        (
            "seed",
            ["1", "1", "9", "1"],
            "rank 2 on host host2 has 9, the others have 1; start all ranks with the same command, "
            "configuration and environment",
        ),
        (
            "start values",
            ["modules 0", "modules 1"],
            "rank 1 on host host1 has modules 1, rank 0 has modules 0; call torch.manual_seed "
            "before you make the modules",
        ),
    ],
)
def test_the_odd_rank_is_named_with_its_host_and_both_values(
    fact: str, values: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {rank: {"torch": "2.13", fact: value} for rank, value in enumerate(values)}

    assert refusals(facts, monkeypatch) == [f"{fact}: {said}"] * len(values)
