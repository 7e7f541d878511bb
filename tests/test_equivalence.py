"""Every layout trains the same model as the dense masked oracle."""

from __future__ import annotations

import pytest
from support.oracle import Oracle
from support.runs import (
    assert_bitwise,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
)

PIPELINES = [(1, 1), (2, 1), (3, 1), (4, 1)]
REPLICAS = [(1, 2), (1, 3), (1, 4), (2, 2)]


@pytest.mark.parametrize(("g_inter", "g_data"), PIPELINES + REPLICAS)
@pytest.mark.parametrize("tied", [True, False])
def test_every_layout_is_bitwise_the_oracle_that_adds_in_its_order(
    g_inter: int, g_data: int, tied: bool
) -> None:
    config = tiny_config(model={"tie_embeddings": tied})
    data = token_data()
    oracle = Oracle(tiny_gpt(config), config, data, g_data).run(8)

    ranks = train_in_process(g_inter, g_data, tiny_gpt(config), config, data)

    for _, trace in ranks:
        assert_bitwise(trace, oracle)
