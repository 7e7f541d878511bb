"""The DeepSpeed-3D-like layout of the cost model."""

from __future__ import annotations

import pytest
from support.planner_cases import SUMMIT, cluster, formula

from axsparse.planner.deepspeed_baseline import TensorParallel, deepspeed_3d
from axsparse.runtime.errors import ConfigError

GPT = formula("gpt3_2.7b")


def test_a_part_computes_and_holds_its_share() -> None:
    whole, part = GPT.stages(4, 1), TensorParallel(GPT, 2).stages(4, 1)
    assert whole is not None and part is not None

    for one, half in zip(whole, part, strict=True):
        assert half.flops == one.flops / 2
        assert half.again_flops == one.again_flops / 2
        assert half.state.total == pytest.approx(one.state.total / 2, abs=8)
        assert half.logits == one.logits / 2
        assert one.working / 2 < half.working < one.working
        assert (half.held, half.outputs) == (one.held, one.outputs)


def test_masters_and_moments_are_sharded_over_replicas() -> None:
    alone, eighth = (TensorParallel(GPT, 1).stages(4, g_data) for g_data in (1, 8))
    assert alone is not None and eighth is not None

    assert eighth[0].state.gradient == alone[0].state.gradient
    assert eighth[0].state.weight == alone[0].state.weight
    assert eighth[0].state.master == pytest.approx(alone[0].state.master / 8, abs=1)
    assert eighth[0].state.optimizer == pytest.approx(alone[0].state.optimizer / 8, abs=1)


def test_a_limit_that_is_too_small_leaves_no_split() -> None:
    assert TensorParallel(GPT, 2).stages(4, 1, lambda stage, _: stage != 3) is None


def test_sharded_state_needs_fewer_stages_than_axonn() -> None:
    found = deepspeed_3d(GPT, SUMMIT, 128, 512)

    assert max(stage.total for stage in found.memory) <= SUMMIT.memory_bytes
    degree = 128 // found.layout.grid.size
    assert degree in (1, 2)  # 32 heads on nodes of six
    assert degree * found.layout.grid.g_inter < 8


def test_a_copy_is_spread_over_as_many_devices_as_asked() -> None:
    found = deepspeed_3d(GPT, SUMMIT, 128, 512, 8)

    assert 128 // found.layout.grid.size * found.layout.grid.g_inter == 8
    assert found.seconds > deepspeed_3d(GPT, SUMMIT, 128, 512).seconds


def test_an_odd_number_of_devices_leaves_only_pipelines() -> None:
    found = deepspeed_3d(GPT, cluster(memory_bytes=1e12), 20, 20, 5)

    assert (found.layout.grid.g_inter, found.layout.grid.g_data) == (5, 4)


def test_slow_rings_within_a_node_make_tensor_parallelism_not_worth_it() -> None:
    slow = deepspeed_3d(GPT, cluster(ring_bandwidth=1e8), 128, 512)

    assert slow.layout.grid.size == 128


def test_the_group_reduces_in_forward_recomputation_and_backward_and_shares_its_cards() -> None:
    gpt = formula("gpt3_13b")
    row = deepspeed_3d(gpt, SUMMIT, 512, 2048)
    stages, replicas = row.layout.grid.g_inter, row.layout.grid.g_data
    assert 512 // row.layout.grid.size == 2
    load, found = row.loads[0], row.costs.stages[0]
    rate = SUMMIT.efficiency * SUMMIT.peak("fp16")
    # A ring of two sends the whole once, twice for a block's attention and MLP.
    nbytes = 2 * row.layout.microbatch_size * gpt.sequence * gpt.hidden
    once = nbytes / SUMMIT.ring_bandwidth + 2 * SUMMIT.ring_latency
    reduces = 2 * gpt.layers / stages * once

    assert found.forward == pytest.approx(load.flops / rate + reduces)
    assert found.backward == pytest.approx((2 * load.flops + load.again_flops) / rate + 2 * reduces)
    # Three groups of two stand on a node: six rings share its cards.
    rings = 2 * min(3, stages)
    bandwidth = SUMMIT.nic_efficiency * SUMMIT.nic_bandwidth / rings
    expected = 2 * (replicas - 1) / replicas * 2 * load.kept / bandwidth
    expected += 2 * (replicas - 1) * SUMMIT.ring_latency
    assert row.costs.all_reduce[0] == pytest.approx(expected)
    flops = 2048 * gpt.sample_flops
    assert row.percent_of_peak == pytest.approx(100 * flops / (row.seconds * 512 * 125e12))


def test_a_model_that_fits_no_degree_is_refused() -> None:
    with pytest.raises(ConfigError, match="no tensor-parallel layout of gpt3_13b fits 2 devices"):
        deepspeed_3d(formula("gpt3_13b"), SUMMIT, 2, 2048)
