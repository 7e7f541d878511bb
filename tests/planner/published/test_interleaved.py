"""Megatron's interleaved schedule: its order, its bubble, its messages."""

from __future__ import annotations

import pytest

from axsparse.pipeline.schedules import Schedule
from axsparse.pipeline.simulator import Durations, MessageCost, simulate
from axsparse.planner.published.interleaved import interleaved_order, simulate_interleaved

FREE = MessageCost()


def uniform(stages: int, chunks: int, microbatches: int, message: float = 0.0) -> float:
    """Seconds of a step whose pieces take 1 / chunks forward and 2 / chunks backward."""
    forward = [[1 / chunks] * chunks] * stages
    backward = [[2 / chunks] * chunks] * stages
    edges = [MessageCost(0.0, message)] * stages
    return simulate_interleaved(forward, backward, edges, microbatches).seconds


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(4, 2, 8), (4, 3, 12), (8, 2, 32)])
def test_the_bubble_is_that_of_the_paper(stages: int, chunks: int, microbatches: int) -> None:
    # (p - 1) / v of a microbatch (Narayanan et al., 2021, section 2.2.2).
    expected = 3 * microbatches + 3 * (stages - 1) / chunks

    assert uniform(stages, chunks, microbatches) == pytest.approx(expected)


def test_one_piece_a_stage_is_1f1b() -> None:
    forward, backward = [1.0, 2.0, 1.5], [2.0, 3.0, 4.0]
    edges = [MessageCost(0.1, 0.2), MessageCost(0.3, 0.1)]
    schedule = Schedule("1f1b", 0, "alternate")
    plain = simulate(
        lambda stage: schedule.policy(stage=stage, g_inter=3, microbatches=7),
        Durations([[f] * 7 for f in forward], [[b] * 7 for b in backward]),
        edges,
    )

    # With one piece Megatron's warm-up is one forward longer a stage than 1F1B's; on the last
    # stage both are the same, and the times of a full pipeline differ by messages only.
    order = interleaved_order(2, 3, 1, 7)
    assert [(is_forward, m) for is_forward, _, m in order[:4]] == [
        *((True, 0), (False, 0), (True, 1), (False, 1))
    ]
    found = simulate_interleaved([[f] for f in forward], [[b] for b in backward], [*edges, FREE], 7)
    assert found.stages[1].compute == plain.stages[1].compute
    assert found.stages[1].p2p == pytest.approx(plain.stages[1].p2p)


def test_the_order_warms_up_by_groups_of_microbatches() -> None:
    order = interleaved_order(1, 2, 2, 4)

    # Two forwards of each piece (p = 2), before the first backward, which is that of the last.
    text = " ".join(f"{'F' if f else 'B'}{piece}.{m}" for f, piece, m in order)
    assert text == (
        "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 F0.3 B0.1 F1.2 B1.2 F1.3 B1.3 B0.2 B0.3"
    )


@pytest.mark.parametrize("stages", [2, 3, 5, 8])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8, 12])
def test_every_forward_and_backward_runs_once_and_nothing_waits_for_ever(
    stages: int, chunks: int, microbatches: int
) -> None:
    for stage in range(stages):
        order = interleaved_order(stage, stages, chunks, microbatches)
        assert len(set(order)) == len(order) == 2 * chunks * microbatches

    assert uniform(stages, chunks, microbatches) >= 3 * microbatches


def test_more_pieces_send_more_messages() -> None:
    forward, backward = [[0.5, 0.5]] * 2, [[1.0, 1.0]] * 2
    run = simulate_interleaved(forward, backward, [MessageCost(0.0, 0.1)] * 2, 4)

    # Of 4 microbatches stage 0 sends piece 0 and takes in and sends piece 1, and so the gradients.
    assert run.stages[0].p2p == pytest.approx(4 * 0.1 * 3 * 2)
