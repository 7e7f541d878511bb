"""The spans of a simulated step."""

from __future__ import annotations

import itertools

import pytest
from support.planner_cases import cluster, formula

from axsparse.observe.trace_file import Span
from axsparse.planner.layout import LayoutQuestion, Row
from axsparse.planner.layout_search import plan
from axsparse.planner.step_simulation import STEP_PHASES
from axsparse.planner.timeline import spans


def row(jitter: float = 0.0) -> Row:
    """Four stages, sixteen replicas, over several nodes; pruned, so that all phases occur."""
    machine = cluster(jitter=jitter)
    found = plan(
        LayoutQuestion(
            workload=formula("gpt3_xl.yaml", 0.1),
            cluster=machine,
            gpus=64,
            global_batch_size=128,
            g_inter=[4],
            microbatch_sizes=[1],
        )
    )
    return found.recommended


def seconds(found: list[Span], stage: int, phase: str) -> float:
    replicas = {span.replica for span in found}
    chosen = [s for s in found if (s.stage, s.phase) == (stage, phase)]
    return sum(span.end - span.begin for span in chosen) / len(replicas)


def test_spans_of_a_phase_add_up_to_its_seconds() -> None:
    best = row()
    found = spans(best)

    for stage, phases in enumerate(best.run.phases):
        for name in STEP_PHASES:
            assert phases[name] > 0
            assert seconds(found, stage, name) == pytest.approx(phases[name], rel=1e-6), name


@pytest.mark.parametrize("jitter", [0.0, 0.2])
def test_a_stage_is_never_in_two_phases_and_never_in_none(jitter: float) -> None:
    best = row(jitter)
    found = spans(best)

    for replica in best.run.pipelines:
        for stage in range(4):
            own = [span for span in found if (span.replica, span.stage) == (replica, stage)]
            own.sort(key=lambda span: span.begin)
            assert own[0].begin == 0
            assert own[-1].end == pytest.approx(best.seconds)
            for before, after in itertools.pairwise(own):
                assert after.begin == pytest.approx(before.end, abs=1e-12)


def test_computing_spans_are_named_by_their_actions() -> None:
    best = row()
    names = [
        span.name
        for span in spans(best)
        if span.phase == "compute" and (span.replica, span.stage) == (0, 3)
    ]

    assert names == [str(action) for action in best.run.pipelines[0].stages[3].actions]
    # Activations are recomputed: one microbatch waits for weight gradients at a time.
    assert names[:6] == ["F0", "B0", "F1", "W0", "B1", "F2"]
