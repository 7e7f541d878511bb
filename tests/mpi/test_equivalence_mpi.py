"""Every layout of the running number of ranks trains the same model as the oracle."""

from __future__ import annotations

import itertools

import pytest
from mpi4py import MPI
from support.by_config import oracle_of
from support.on_mpi import by_first_rank, on_mpi
from support.oracle import Oracle
from support.runs import (
    assert_bitwise,
    mlp,
    tiny_config,
    tiny_gpt,
    token_data,
    train_here,
    train_in_process,
    vector_data,
)

from axsparse.runtime.grid import Grid

SIZE = MPI.COMM_WORLD.size
GRIDS = [Grid(g, SIZE // g) for g in range(SIZE, 0, -1) if SIZE % g == 0]
METHODS = list(
    zip(("rigl", "snip", "early-bird", "iterative"), itertools.cycle(GRIDS), strict=False)
)
"""Each method has one layout here; `tests/pruning/methods` has every method in every layout."""


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.g_inter}x{grid.g_data}")
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_gpt_is_bitwise_the_oracle_that_adds_in_its_order(grid: Grid, tied: bool) -> None:
    config = tiny_config(model={"tie_embeddings": tied})
    data = token_data()
    oracle = Oracle(tiny_gpt(config), config, data, grid.g_data)
    reference = by_first_rank(lambda: oracle.run(8))

    with on_mpi() as transport:
        _, trace = train_here(transport, grid, tiny_gpt(config), config, data)

    assert_bitwise(trace, reference)


@pytest.mark.parametrize(("method", "grid"), METHODS, ids=str)
def test_masks_over_time_are_bitwise_the_oracles(method: str, grid: Grid) -> None:
    config = tiny_config(
        pruning={"method": method, "interval": 1, "until_step": 8, "threshold": 0.4},
        schedule={"warmup_steps": 1},
        train={"steps": 9},
    )
    reference = by_first_rank(lambda: oracle_of(config, grid.g_data).run(9))

    with on_mpi() as transport:
        _, trace = train_here(transport, grid, tiny_gpt(config), config, token_data())

    assert_bitwise(trace, reference)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: f"{grid.g_inter}x{grid.g_data}")
@pytest.mark.parametrize("shard", [False, True], ids=["whole", "sharded"])
def test_a_model_of_ones_own_is_bitwise_the_oracle_too(grid: Grid, shard: bool) -> None:
    # Wide enough that shares of sharded state split a tensor.
    config = tiny_config(
        pruning={"sparsity": 0.4},
        optimizer={"learning_rate": 1e-3},
        samo={"shard_optimizer": shard},
        train={"steps": 3},
    )
    model, data = mlp(width=510), vector_data(width=510)
    reference = by_first_rank(lambda: Oracle(model, config, data, grid.g_data).run(3))

    with on_mpi() as transport:
        _, trace = train_here(transport, grid, model, config, data)

    assert_bitwise(trace, reference)


def test_masks_by_samples_that_travelled_are_those_of_one_process() -> None:
    config = tiny_config(
        pruning={"method": "wanda", "sparsity": 0.6, "calibration_samples": 5},
        train={"steps": 2},
    )
    reference = by_first_rank(
        lambda: train_in_process(1, 1, tiny_gpt(config), config, token_data())[0][1]
    )

    with on_mpi() as transport:
        _, trace = train_here(transport, Grid(SIZE, 1), tiny_gpt(config), config, token_data())

    assert_bitwise(trace, reference)
