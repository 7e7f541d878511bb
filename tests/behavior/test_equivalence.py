"""Every layout trains the same model as the dense masked oracle."""

from __future__ import annotations

import pytest
import torch
from support.exhaustive import by_default, each_once
from support.oracle import Oracle
from support.runs import (
    assert_bitwise,
    mlp,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
    vector_data,
)

PIPELINES = [(1, 1), (2, 1), (3, 1), (4, 1)]
REPLICAS = [(1, 2), (1, 3), (1, 4), (2, 2)]
REPLICAS_TOLERANCE = 2e-6
"""Other orders of fp32 sums: 1.4e-7 was the most seen over eight steps, one unit of an fp32."""
BF16_TOLERANCE = 0.002
"""bf16 has 8 bits of mantissa: a weight is off by up to 0.4 %, a mean over many by much less
(3e-4 seen)."""
FP16_TOLERANCE = 3e-4
"""fp16 has three more bits than bf16 (1e-5 seen)."""


@pytest.mark.parametrize(
    ("layout", "tied"), each_once(PIPELINES + REPLICAS, [False, True]), ids=str
)
def test_every_layout_is_bitwise_the_oracle_that_adds_in_its_order(
    layout: tuple[int, int], tied: bool
) -> None:
    g_inter, g_data = layout
    config = tiny_config(model={"tie_embeddings": tied})
    data = token_data()
    oracle = Oracle(tiny_gpt(config), config, data, g_data).run(8)

    ranks = train_in_process(g_inter, g_data, tiny_gpt(config), config, data)

    for _, trace in ranks:
        assert_bitwise(trace, oracle)


@pytest.mark.parametrize("order", by_default(range(3), range(6)))
def test_no_arrival_order_changes_a_bit(order: int) -> None:
    config = tiny_config(train={"steps": 3}, pipeline={"slack": order % 3})
    data = token_data()
    oracle = Oracle(tiny_gpt(config), config, data, 1).run(3)

    for _, trace in train_in_process(4, 1, tiny_gpt(config), config, data, order=order):
        assert_bitwise(trace, oracle)


@pytest.mark.parametrize("prefer", ["alternate", "backward", "forward"])
def test_no_preference_changes_a_bit(prefer: str) -> None:
    config = tiny_config(train={"steps": 2}, pipeline={"prefer": prefer})
    data = token_data()
    oracle = Oracle(tiny_gpt(config), config, data, 1).run(2)

    for _, trace in train_in_process(3, 1, tiny_gpt(config), config, data, order=1):
        assert_bitwise(trace, oracle)


PRUNING: list[dict[str, object]] = [
    {"method": "random"},
    {"include": "all"},
    {"sparsity": 0.0},
    {"sparsity": 0.99},
    {"at_step": 3},
    {"at_step": 3, "include": "all"},
]


@pytest.mark.parametrize(
    ("layout", "pruning"), each_once([(1, 1), (2, 1), (2, 2)], PRUNING), ids=str
)
def test_every_way_of_pruning_is_bitwise_the_oracle(
    layout: tuple[int, int], pruning: dict[str, object]
) -> None:
    g_inter, g_data = layout
    config = tiny_config(train={"steps": 6}, pruning=pruning)
    data = token_data()
    oracle = Oracle(tiny_gpt(config), config, data, g_data).run(6)

    for _, trace in train_in_process(g_inter, g_data, tiny_gpt(config), config, data):
        assert_bitwise(trace, oracle)


def test_dense_training_is_bitwise_the_oracle_without_masks() -> None:
    config = tiny_config(samo={"enabled": False}, train={"steps": 4})
    data = token_data()
    unpruned = tiny_config(pruning={"sparsity": 0.0}, train={"steps": 4})
    oracle = Oracle(tiny_gpt(config), unpruned, data, 2).run(4)

    for trainer, trace in train_in_process(2, 2, tiny_gpt(config), config, data):
        assert_bitwise(trace, oracle)
        assert trainer.state_bytes().index == 0


@pytest.mark.parametrize(("g_inter", "g_data"), [(1, 1), (4, 1), (2, 2)])
def test_a_step_with_an_overflow_is_skipped_by_all_ranks_alike(g_inter: int, g_data: int) -> None:
    config = tiny_config(batch={"global_batch_size": 12, "microbatch_size": 3}, train={"steps": 7})
    data = vector_data(infinite=17)
    oracle = Oracle(mlp(), config, data, g_data).run(7)
    assert 0 < oracle.finite.count(False) < 7

    for _, trace in train_in_process(g_inter, g_data, mlp(), config, data):
        assert trace.finite == oracle.finite
        assert [loss for loss, good in zip(trace.losses, trace.finite, strict=True) if good] == [
            loss for loss, good in zip(oracle.losses, oracle.finite, strict=True) if good
        ]
        for name, weight in trace.weights.items():
            assert torch.equal(weight, oracle.weights[name])


@pytest.mark.parametrize(("every", "g_inter"), each_once([1, 2], [1, 2]))
def test_recomputed_activations_change_no_bit(every: int, g_inter: int) -> None:
    settings = {"train": {"steps": 3}, "model": {"dropout": 0.2}}
    kept, recomputed = (
        tiny_config(**settings, pipeline={"checkpoint_activations": k}) for k in (0, every)
    )
    data = token_data()
    [(_, reference)] = train_in_process(1, 1, tiny_gpt(kept), kept, data)

    for _, trace in train_in_process(g_inter, 1, tiny_gpt(kept), recomputed, data):
        assert_bitwise(trace, reference)


def test_dropout_does_not_depend_on_the_layout() -> None:
    config = tiny_config(model={"dropout": 0.3}, train={"steps": 4})
    data = token_data()
    [(_, reference)] = train_in_process(1, 1, tiny_gpt(config), config, data)
    without = tiny_config(train={"steps": 4})
    [(_, plain)] = train_in_process(1, 1, tiny_gpt(without), without, data)

    assert reference.losses[0] != plain.losses[0]
    for g_inter in (2, 3, 4):
        for _, trace in train_in_process(g_inter, 1, tiny_gpt(config), config, data):
            assert_bitwise(trace, reference)


def test_training_leaves_torchs_random_numbers_alone() -> None:
    config = tiny_config(model={"dropout": 0.3}, train={"steps": 1})
    torch.manual_seed(99)
    expected = torch.rand(3)
    torch.manual_seed(99)

    train_in_process(1, 1, tiny_gpt(config), config, token_data())

    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("g_data", by_default([3], [2, 3, 4]))
def test_replicas_agree_with_one_replica_to_the_rounding_of_their_sums(g_data: int) -> None:
    config = tiny_config()
    data = token_data()
    [(_, one)] = train_in_process(1, 1, tiny_gpt(config), config, data)

    [(_, many), *_] = train_in_process(1, g_data, tiny_gpt(config), config, data)

    assert many.losses == pytest.approx(one.losses, rel=REPLICAS_TOLERANCE)
    assert many.norms == pytest.approx(one.norms, rel=REPLICAS_TOLERANCE)


@pytest.mark.parametrize(
    ("layout", "gradient"),
    each_once([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2)], ["half", "fp32"]),
    ids=str,
)
def test_bf16_follows_the_fp32_oracle(layout: tuple[int, int], gradient: str) -> None:
    g_inter, g_data = layout
    config = tiny_config(precision="bf16", samo={"gradient": gradient})
    data = token_data()
    oracle = Oracle(tiny_gpt(config), config, data, 1).run(8)

    for _, trace in train_in_process(g_inter, g_data, tiny_gpt(config), config, data):
        assert trace.losses == pytest.approx(oracle.losses, rel=BF16_TOLERANCE)
        assert trace.losses != oracle.losses


@pytest.mark.parametrize(
    ("layout", "gradient"), each_once([(1, 1), (2, 1), (2, 2)], ["half", "fp32"]), ids=str
)
def test_fp16_follows_the_fp32_oracle_under_any_loss_scale(
    layout: tuple[int, int], gradient: str
) -> None:
    g_inter, g_data = layout
    samo = {"gradient": gradient}
    config = tiny_config(precision="fp16", samo=samo, loss_scale={"growth_interval": 2})
    data = token_data()
    oracle = Oracle(tiny_gpt(config), config, data, 1).run(8)

    for trainer, trace in train_in_process(g_inter, g_data, tiny_gpt(config), config, data):
        assert trace.finite == [True] * 8
        assert trace.losses == pytest.approx(oracle.losses, rel=FP16_TOLERANCE)
        assert trace.norms == pytest.approx(oracle.norms, rel=FP16_TOLERANCE * 10)
        assert trainer.parts.loss_scale.scale == 65536.0 * 2**4


@pytest.mark.parametrize(("g_inter", "g_data"), [(1, 1), (2, 1), (2, 2)])
def test_fp16_overflows_lower_the_scale_on_all_ranks_alike(g_inter: int, g_data: int) -> None:
    # So high a scale overflows some gradients until it has been halved a few times.
    config = tiny_config(precision="fp16", loss_scale={"initial": 2.0**21, "growth_interval": 4})
    data = token_data()

    ranks = train_in_process(g_inter, g_data, tiny_gpt(config), config, data)

    [finite] = {tuple(trace.finite) for _, trace in ranks}
    assert not finite[0]
    assert finite[-1]
    assert len({trainer.parts.loss_scale.scale for trainer, _ in ranks}) == 1
    weights = {name: w for _, trace in ranks[:g_inter] for name, w in trace.weights.items()}
    for _, trace in ranks[g_inter:]:
        for name, weight in trace.weights.items():
            assert torch.equal(weight, weights[name])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_pipelines_are_bitwise_one_stage(precision: str) -> None:
    config = tiny_config(precision=precision, train={"steps": 4})
    data = token_data()
    [(_, one)] = train_in_process(1, 1, tiny_gpt(config), config, data)

    for g_inter in (2, 3, 4):
        for _, trace in train_in_process(g_inter, 1, tiny_gpt(config), config, data):
            assert_bitwise(trace, one)


@pytest.mark.parametrize("microbatches", [1, 2, 3])
def test_fewer_microbatches_than_stages_work(microbatches: int) -> None:
    batch = {"global_batch_size": 6, "microbatch_size": 6 // microbatches}
    config = tiny_config(batch=batch, train={"steps": 2})
    data = token_data()
    oracle = Oracle(tiny_gpt(config), config, data, 1).run(2)

    for _, trace in train_in_process(4, 1, tiny_gpt(config), config, data):
        assert_bitwise(trace, oracle)


def test_evaluation_takes_any_remainder_and_touches_nothing() -> None:
    # 23 samples in global batches of 12, microbatches of 5: the last of each is smaller.
    config = tiny_config(
        batch={"global_batch_size": 12, "microbatch_size": 3},
        train={"steps": 3, "eval_every": 1, "eval_steps": 9},
        model={"dropout": 0.2},
    )
    silent = config.model_copy(update={"train": config.train.model_copy(update={"eval_steps": 0})})
    data, validation = token_data(), token_data(samples=23)
    [(_, reference)] = train_in_process(1, 1, tiny_gpt(config), silent, data)

    evaluated = []
    for g_inter, g_data in [(1, 1), (2, 1), (4, 1), (2, 2)]:
        ranks = train_in_process(
            g_inter, g_data, tiny_gpt(config), config, data, validation=validation
        )
        if g_data == 1:
            for _, trace in ranks:
                assert_bitwise(trace, reference)
        last = [trainer.last_evaluation for trainer, _ in ranks]
        evaluated.append({found.loss for found in last if found is not None})

    assert evaluated[0] == evaluated[1] == evaluated[2]
    assert all(len(values) == 1 for values in evaluated)
    assert evaluated[3].pop() == pytest.approx(evaluated[0].pop(), rel=REPLICAS_TOLERANCE)
