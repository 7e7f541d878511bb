"""Rows of the table on the running number of ranks, with the same references as in one process."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from mpi4py import MPI
from support.cases import (
    GPT,
    ONE_STAGE,
    PRUNING,
    WIDE,
    Row,
    batch,
    hold,
    parameters,
    reference,
    steps,
)
from support.on_mpi import by_first_rank, on_mpi
from support.runs import train_here

from axsparse.runtime.grid import Grid

SIZE = MPI.COMM_WORLD.size
LAYOUTS = [(g, SIZE // g) for g in range(SIZE, 0, -1) if SIZE % g == 0]
FEW = replace(GPT, settings={"batch": {"microbatch_size": 3}})
ROWS = [
    *(
        Row(layout, steps(3, model={"tie_embeddings": tied}), subject=FEW)
        for layout, tied in zip(LAYOUTS, itertools.cycle([True, False]), strict=False)
    ),
    # In one process every method has every layout.
    Row(
        LAYOUTS[0],
        {"pruning": PRUNING["early-bird"], "schedule": {"warmup_steps": 1}, "train": {"steps": 9}},
        subject=FEW,
    ),
    *(
        Row(
            layout,
            {
                **steps(4, **batch(9, 2)),
                "samo": {"weights": "sparse", "zero_stage": 3},
                "pruning": {"include": "all"},
            },
            subject=WIDE,
        )
        for layout in LAYOUTS
        if layout[1] > 1
    ),
    # Integers, and replicas of which one takes a microbatch more.
    *(
        Row(
            layout,
            {
                **steps(4, **batch(11, 2)),
                "samo": {"gradient": "exact", "zero_stage": layout[0] == 1},
            },
            is_usual=layout[0] == 1,
        )
        for layout in LAYOUTS
    ),
    # Members that share the layers of a stage: all ranks, or half of them.
    *(
        Row(
            (SIZE // g_tensor, 1),
            {**steps(2), "layout": {"g_tensor": g_tensor}, "model": {"num_heads": 4}},
            {},
            ONE_STAGE,
            FEW,
        )
        for g_tensor in {SIZE, SIZE // 2} - {1}
    ),
    # Masks by samples that travelled.
    Row(
        (SIZE, 1),
        {
            "pruning": {"method": "wanda", "sparsity": 0.6, "calibration_samples": 5},
            "train": {"steps": 2},
        },
        judge=ONE_STAGE,
        subject=FEW,
    ),
]


@pytest.mark.parametrize("row", parameters(ROWS))
def test_a_run_on_mpi_is_what_its_judge_says(row: Row) -> None:
    references = by_first_rank(lambda: reference(row))
    config, subject = row.config(), row.subject

    with on_mpi() as transport:
        rank = transport.rank
        _, trace = train_here(
            transport,
            Grid(*row.layout, row.g_tensor),
            subject.model(config),
            config,
            subject.data(),
        )

    hold(row, rank, trace, references)
    assert subject is not FEW or trace.weights
