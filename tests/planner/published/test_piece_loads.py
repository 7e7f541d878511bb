"""Which blocks stand where, and what each piece computes and holds."""

from __future__ import annotations

import pytest
from support.published_runs import run

from axsparse.planner.published.piece_loads import (
    PieceLoad,
    even_blocks,
    pieces,
    stage_pieces,
    transformer,
)
from axsparse.planner.published.run_file import RunRow


def loads(row: RunRow) -> list[PieceLoad]:
    model = transformer(row, fused=False)
    return [PieceLoad(model, piece, row) for piece in pieces(row, model)]


@pytest.mark.parametrize(
    ("layers", "number", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]),
        (22, 8, [2, 3, 3, 3, 3, 3, 3, 2]),  # Qi et al. (2024), section 5.1
        (62, 32, [1, *[2] * 30, 1]),
        (7, 4, [1, 2, 2, 2]),
        (2, 4, [0, 1, 1, 0]),
    ],
)
def test_uneven_blocks_are_fewer_at_the_ends(layers: int, number: int, sizes: list[int]) -> None:
    assert even_blocks(layers, number) == sizes


@pytest.mark.parametrize("split", ["even", "balanced", "fractions", (3, 5, 5, 3)])
def test_every_split_places_the_whole_model_once(split: object) -> None:
    row = run(layout={"pipeline": 4, "split": split})
    found = loads(row)

    assert sum(load.piece.blocks for load in found) == 16
    assert sum(load.piece.embedding for load in found) == 1
    assert sum(load.piece.head for load in found) == 1
    model = found[0].model
    assert sum(load.forward.flops for load in found) == pytest.approx(model.model_flops * 2 / 3)


def test_a_large_head_makes_the_last_stage_slow_where_blocks_are_even() -> None:
    even = loads(run(layout={"pipeline": 16}))
    balanced = loads(run(layout={"pipeline": 4, "split": "balanced"}))

    assert even[-1].forward.flops > 3 * even[1].forward.flops
    assert balanced[-1].piece.blocks < balanced[1].piece.blocks


def test_chunks_of_a_stage_lie_a_pipeline_apart() -> None:
    row = run(layout={"pipeline": 4, "chunks": 2, "split": [1, 2, 3, 1, 1, 3, 2, 3]})
    blocks = [[load.piece.blocks for load in stage] for stage in stage_pieces(loads(row), 4)]

    assert blocks == [[1, 1], [2, 3], [3, 2], [1, 3]]


def test_full_recomputation_repeats_blocks_and_selective_their_attention() -> None:
    [none], [selective], [full] = (
        loads(run(recompute=kind)) for kind in ("none", "selective", "full")
    )

    assert none.again.flops == 0
    assert full.again.flops == pytest.approx(16 * full.model.block_flops * 2)
    assert selective.again.flops == pytest.approx(16 * 2 * 4 * 2048**2 * 1536)


def test_a_tied_weight_counts_twice_only_where_its_uses_are_apart() -> None:
    def params(**layout: object) -> float:
        return sum(load.params for load in loads(run(layout=layout)))

    words = 51200 * 1536
    assert params(pipeline=2) - params(pipeline=1) == words
    assert params(pipeline=4, split="fractions") == pytest.approx(params(pipeline=1))
    untied = run(model={"tie_embeddings": False})
    assert loads(untied)[0].params - params(pipeline=1) == words


def test_pruning_keeps_embeddings_and_divides_blocks() -> None:
    [load] = loads(run(sparsity=0.9))

    assert load.kept == pytest.approx(load.params - 0.9 * 16 * 12 * 1536**2)
