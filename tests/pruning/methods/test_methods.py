"""Every pruning method against a dense oracle that sorts whole tensors, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
from support.exhaustive import by_default, each_once
from support.methods import MethodOracle
from support.runs import assert_bitwise, tiny_config, tiny_gpt, token_data, train_in_process

from axsparse.config.schema import Config

LAYOUTS = [(1, 1), (2, 1), (3, 1), (2, 2)]
METHODS: dict[str, dict[str, Any]] = {
    "magnitude at once": {"method": "magnitude"},
    "magnitude later": {"method": "magnitude", "at_step": 3},
    "magnitude, rewound": {"method": "magnitude", "at_step": 3, "rewind_step": 0},
    "magnitude, rewound to step 2": {"method": "magnitude", "at_step": 4, "rewind_step": 2},
    "random": {"method": "random", "at_step": 2},
    "snip": {"method": "snip"},
    "snip later": {"method": "snip", "at_step": 2},
    "gradual": {"method": "gradual", "at_step": 1, "interval": 2, "until_step": 7},
    "iterative": {"method": "iterative", "interval": 2, "until_step": 6},
    "iterative to step 1": {
        **{"method": "iterative", "at_step": 1, "interval": 2, "until_step": 6},
        "rewind_step": 1,
    },
    "early-bird": {"method": "early-bird", "interval": 1, "until_step": 8, "threshold": 0.4},
    "early-bird by hamming, rewound": {
        **{"method": "early-bird", "interval": 1, "until_step": 8, "threshold": 0.2},
        **{"metric": "hamming", "rewind_step": 0},
    },
}

WIDE = tiny_config().model.model_copy(update={"hidden_size": 160})


def settings(method: str, **pruning: Any) -> Config:
    return tiny_config(
        pruning={**METHODS[method], **pruning},
        schedule={"warmup_steps": 1},
        train={"steps": 10},
    )


def agree(config: Config, g_inter: int, g_data: int) -> MethodOracle:
    oracle = MethodOracle(tiny_gpt(config), config, token_data(), g_data)
    expected = oracle.run(config.train.steps)

    ranks = train_in_process(g_inter, g_data, tiny_gpt(config), config, token_data())

    for trainer, trace in ranks:
        assert_bitwise(trace, expected)
        for layer in trainer.parts.layers:
            for tensor in layer.state.owned:
                mask = oracle.masks.get(tensor.name)
                if mask is not None:
                    expected_positions = mask.view(-1).nonzero().view(-1).tolist()
                    assert tensor.index.positions().tolist() == expected_positions, tensor.name
    return oracle


@pytest.mark.parametrize(("method", "layout"), each_once(list(METHODS), LAYOUTS), ids=str)
def test_every_method_is_bitwise_the_oracle(method: str, layout: tuple[int, int]) -> None:
    oracle = agree(settings(method), *layout)

    assert oracle.changes, "the method did something"


@pytest.mark.parametrize(("g_inter", "g_data"), by_default([(2, 2)], [(2, 1), (2, 2)]))
def test_tensors_that_shrink_to_fewer_blocks_of_the_norm_count_once(
    g_inter: int, g_data: int
) -> None:
    """A tensor of 102,400 entries has two blocks in the norm; the 20,480 that are kept have one."""
    agree(settings("magnitude later").model_copy(update={"model": WIDE}), g_inter, g_data)


DISTRIBUTIONS = [("erk", (3, 1)), ("erk", (2, 2)), ("global", (3, 1)), ("global", (2, 2))]


@pytest.mark.parametrize(
    ("method", "distribution"),
    each_once(["magnitude at once", "snip", "gradual", "early-bird"], DISTRIBUTIONS),
    ids=str,
)
def test_every_distribution_is_bitwise_the_oracle(
    method: str, distribution: tuple[str, tuple[int, int]]
) -> None:
    name, layout = distribution
    agree(settings(method, distribution=name, include="all"), *layout)


@pytest.mark.parametrize(
    "method", by_default(["gradual", "early-bird"], ["snip", "gradual", "iterative", "early-bird"])
)
def test_methods_work_alike_on_sharded_state(method: str) -> None:
    config = settings(method, distribution="global")
    sharded = config.model_copy(
        update={"samo": config.samo.model_copy(update={"shard_optimizer": True})}
    )
    whole = train_in_process(2, 2, tiny_gpt(config), config, token_data())

    ours = train_in_process(2, 2, tiny_gpt(config), sharded, token_data())

    for (_, mine), (_, other) in zip(ours, whole, strict=True):
        assert_bitwise(mine, other)
