"""Memory of published runs: state and activations by hand, and the verdict."""

from __future__ import annotations

from typing import Any

import pytest
from support.published_runs import run, selene

from axsparse.planner.published.run_memory import pieces_in_flight, predict_memory

SELENE = selene()
BLOCKS = 16 * 12 * 1536**2
WORDS, POSITIONS = 51200 * 1536, 2048 * 1536
WHOLE = BLOCKS + WORDS + POSITIONS


@pytest.mark.parametrize(
    ("training", "bytes_each"),
    [
        ({}, 16),
        ({"gradients": "fp32"}, 18),
        ({"precision": "bf16"}, 18),
        ({"precision": "fp32"}, 16),
    ],
)
def test_a_dense_parameter_costs_its_precisions(training: dict[str, Any], bytes_each: int) -> None:
    assert predict_memory(run(**training), SELENE).state == bytes_each * WHOLE


@pytest.mark.parametrize(("zero", "bytes_each"), [(1, 2 + 2 + 1.5), (2, 2 + 2.25 - 0.5), (3, 2.0)])
def test_zero_shards_more_and_more(zero: int, bytes_each: float) -> None:
    row = run(layout={"data": 8}, samples=64, zero=zero)

    assert predict_memory(row, SELENE).state == pytest.approx(bytes_each * WHOLE)


def test_pruned_state_is_compressed() -> None:
    kept = 0.1 * BLOCKS + WORDS + POSITIONS

    found = predict_memory(run(sparsity=0.9, schedule="message-driven"), SELENE)

    assert found.state == pytest.approx(2 * WHOLE + (2 + 2 + 12) * kept)


def test_activations_are_those_of_the_microbatches_in_flight() -> None:
    row = run(layout={"pipeline": 4, "tensor": 2})
    held = 2048 * 2 * 1536 * (10 + 12 + 2.5 * 16 * 2048 / 1536)

    found = predict_memory(row, SELENE)

    # The first stage holds four microbatches of its four blocks, and of its embedding.
    assert found.activations == pytest.approx(4 * (4 * held + 2 * 2 * 2048 * 1536))


def test_full_recomputation_keeps_inputs_and_works_on_one_block_at_a_time() -> None:
    none, full = (
        predict_memory(run(recompute=kind, model={"vocab_size": 128}), SELENE)
        for kind in ("none", "full")
    )

    assert full.activations < none.activations / 20
    assert full.working == pytest.approx(none.activations / 16, rel=0.01)


@pytest.mark.parametrize(
    ("layout", "samples", "held"),
    [
        ({"pipeline": 4}, 16, [4, 3, 2, 1]),
        ({"pipeline": 4}, 4, [2, 2, 2, 1]),
        ({"pipeline": 4, "chunks": 2}, 16, [11, 9, 7, 5]),
        ({"pipeline": 4, "chunks": 2}, 8, [8, 8, 8, 8]),
    ],
)
def test_schedules_hold_what_they_hold(
    layout: dict[str, int], samples: int, held: list[int]
) -> None:
    row = run(layout=layout, samples=samples)

    assert [pieces_in_flight(row, stage) for stage in range(4)] == held


def test_copies_of_gradients_count_where_activations_were_less() -> None:
    row = run(recompute="full", micro=1, model={"vocab_size": 128, "sequence_length": 64})

    found = predict_memory(row, SELENE)

    assert found.update == 4 * found.state / 16
    assert found.total == found.state + found.update > found.state + found.activations
    ours = run(recompute="full", micro=1, schedule="message-driven")
    assert predict_memory(ours, SELENE).update == 0


def test_the_verdict_adds_what_libraries_hold() -> None:
    row = run()
    total = predict_memory(row, SELENE).total

    assert predict_memory(row, SELENE).fits(selene(memory_bytes=1.05 * total + 3e9))
    assert not predict_memory(row, SELENE).fits(selene(memory_bytes=1.05 * total))
