"""Ours and peers: times count only if all losses agree, and the fastest setting counts."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peers.contenders import ours, plain
from peers.contenders.contender import Seat
from peers.gpt import Stream
from peers.launch import Failure, join
from peers.measuring import Measured, RunLog
from peers.ratios import agrees, difference, ratio_of
from peers.times import fastest_variants, judge, speedups, time_rows
from peers.workload import (
    DDP,
    FSDP2,
    OURS_DENSE,
    OURS_SAMO,
    OURS_SAMO_MASK,
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
DENSE, MASKED = [9.0, 8.0], [9.0, 8.5]
SAMO = OURS_SAMO.at(1, 2)


@pytest.mark.parametrize(
    ("own", "peer", "precision"),
    [
        (OURS_DENSE, PLAIN, "fp32"),
        (OURS_SAMO, PLAIN_MASKED, "bf16"),
        (OURS_SAMO_MASK, PLAIN_MASKED, "fp32"),
    ],
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


def row(ends: list[float], losses: list[list[float]]) -> dict[str, object]:
    return {
        "ends": ends,
        "cpu": [1.0, 2.0, 3.0],
        "machine": [10.0, 20.0, 30.0],
        "losses": losses,
        "peak": 5,
        "before": 2,
        "tokens": "0",
        "torch": "2",
    }


def test_a_step_ends_when_it_has_ended_on_the_last_rank() -> None:
    run = Run(DDP, SIZES["tiny"], "bf16", steps=2, warmup=1)

    found = join(
        run,
        [
            row([1.0, 2.0, 5.0], [[9.0], [8.0], [7.0]]),
            row([1.5, 3.0, 4.0], [[9.0], [8.0], [6.0]]),
        ],
    )

    assert found["seconds"] == [1.5, 2.0]  # 1.5 to 3.0 to 5.0
    assert found["losses"] == [9.0, 8.0, 6.5]
    assert found["peak_bytes_above_libraries"] == [3, 3]


def test_only_runs_of_the_same_code_and_settings_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "new" / "runs.jsonl"
    RunLog(path, "a").put(RUN, 0, {"median_seconds": 1.0}, 5.0)
    RunLog(path, "a").put(RUN, 1, Failure("process 0 ended with 1", "bad_alloc"), 5.0)

    assert RunLog(path, "a").get(RUN, 0) == {"median_seconds": 1.0}
    failure = RunLog(path, "a").get(RUN, 1)
    assert isinstance(failure, Failure) and failure.is_memory
    assert RunLog(path, "b").get(RUN, 0) is None
    assert RunLog(path, "a").get(replace(RUN, steps=4), 0) is None


# -- who counts -----------------------------------------------------------------------------


def run(seconds: float, losses: list[float], tokens: str = "0") -> dict[str, Any]:
    return {
        "median_seconds": seconds,
        "losses": losses,
        "tokens": tokens,
        "cpu_seconds": seconds,
        "foreign_share": 0.0,
        "peak_bytes_above_libraries": [1],
    }


def measured(more: dict[Case, dict[int, Any]]) -> Measured:
    plain_runs: dict[int, Any] = {0: run(2.0, DENSE), 1: run(4.0, DENSE)}
    masked_runs: dict[int, Any] = {0: run(2.2, MASKED), 1: run(4.4, MASKED)}
    return Measured(SIZES["tiny"], "fp32", {PLAIN: plain_runs, PLAIN_MASKED: masked_runs, **more})


@pytest.mark.parametrize(
    ("more", "refused"),
    [
        (
            {DDP: {0: run(1.0, DENSE), 1: run(1.0, [9.0, 8.1])}},
            {DDP: "losses differ: 1.9 digits"},
        ),
        ({SAMO: {0: run(1.0, MASKED)}}, {}),
        ({SAMO: {0: run(1.0, DENSE)}}, {SAMO: "losses differ: 1.2 digits"}),
        ({DDP: {0: run(1.0, DENSE, tokens="1")}}, {DDP: "read other tokens"}),
        ({SAMO: {0: Failure("process 0 ended with 1", "MemoryError")}}, {SAMO: "no memory"}),
    ],
    ids=["one step", "masked", "unmasked", "tokens", "memory"],
)
def test_who_computes_something_else_does_not_count(
    more: dict[Case, dict[int, Any]], refused: dict[Case, str]
) -> None:
    found = measured(more)

    assert judge(found) == refused
    assert [row["does not count"] for row in time_rows(found) if "does not count" in row] == [
        *refused.values()
    ]
    assert not agrees(difference([math.nan, 1.0], [1.0, 1.0]), "bf16")


def test_speedups_are_over_the_fastest_setting_of_a_peer() -> None:
    slow, fast, _ = FSDP2
    found = measured(
        {slow: {0: run(3.0, DENSE)}, fast: {0: run(1.8, DENSE)}, SAMO: {0: run(1.0, MASKED)}}
    )

    assert fastest_variants(found, {})[fast.family] == fast
    [row] = speedups(found)
    assert (row["peer"], row["setting"]) == ("FSDP2", "resharded")
    assert row["times_as_fast"]["median"] == 1.8
    # The machine was three times as slow in round 1: both suffered, and the ratio did not.
    ratio = ratio_of({0: 2.0, 1: 6.6, 2: 2.4}, {0: 1.0, 1: 3.0, 2: 1.0, 3: 9.0})
    assert ratio is not None and ratio.median == pytest.approx(2.2)
