"""Ours and plain torch compute the same: otherwise a comparison of times says nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from peers.contenders import ours, plain
from peers.contenders.contender import Seat
from peers.contenders.zero_bubble import stages_of
from peers.gpt import Stream
from peers.launch import Failure, launch
from peers.ratios import agrees, difference
from peers.workload import (
    OURS_DENSE,
    OURS_SAMO,
    OURS_SAMO_MASK,
    OURS_SHARDED,
    PLAIN,
    PLAIN_MASKED,
    SIZES,
    Case,
    Precision,
    Run,
)

from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld

TOLERANCE = {"fp32": 1e-6, "bf16": 2e-4}
"""Of so few steps: without weight decay, losses differ by 2e-6 and more in fp32."""
RUN = Run(PLAIN, replace(SIZES["tiny"], blocks=2, microbatches=4), "fp32", 3, 1)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("own", "peer"),
    [(OURS_DENSE, PLAIN), (OURS_SAMO, PLAIN_MASKED), (OURS_SAMO_MASK, PLAIN_MASKED)],
)
def test_losses_of_every_step_agree(
    own: Case, peer: Case, precision: Precision, tmp_path: Path
) -> None:
    run = replace(RUN, case=own, precision=precision)
    losses: list[float] = []
    ours.train(Job(LocalTransport(LocalWorld(1), 0)), run, tmp_path / "run", losses.append)
    judged = replace(run, case=peer)
    contender = plain.start(Seat(judged, 0, Stream(run.size, run.all_steps)))
    expected = [sum(contender.step(number)) / 4 for number in range(run.all_steps)]

    assert difference(losses, expected) <= TOLERANCE[precision]
    # Later losses judge updates, since updates change them by more than the tolerance.
    assert not agrees(difference(expected[-1:], expected[:1]), precision)


def test_a_variant_is_a_setting(tmp_path: Path) -> None:
    samo, mask, sharded = (
        ours.configuration(replace(RUN, case=case), tmp_path).samo
        for case in (OURS_SAMO, OURS_SAMO_MASK, OURS_SHARDED)
    )

    assert (samo.index, mask.index) == ("auto", "mask")
    assert (mask.shard_optimizer, sharded.shard_optimizer) == (False, True)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "schedule",
    ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble", "ScheduleDualPipeV"],
)
def test_torchs_zero_bubble_schedules_train_as_plain_torch(schedule: str) -> None:
    size = replace(RUN.size, blocks=3)
    case = Case(schedule, "zero-bubble", 2, 1, variant=schedule)
    found = launch(replace(RUN, case=case, size=size), 100)
    expected = launch(replace(RUN, case=PLAIN, size=size), 100)

    assert not isinstance(found, Failure) and not isinstance(expected, Failure), (found, expected)
    assert difference(found["losses"], expected["losses"]) <= TOLERANCE["fp32"]


def test_ranks_take_their_stages_in_turn_or_as_a_v() -> None:
    assert [stages_of("ScheduleInterleavedZeroBubble", rank, 3) for rank in range(3)] == [
        [0, 3],
        [1, 4],
        [2, 5],
    ]
    assert [stages_of("ScheduleZBVZeroBubble", rank, 3) for rank in range(3)] == [
        [0, 5],
        [1, 4],
        [2, 3],
    ]
