"""Ours and plain torch compute the same: otherwise a comparison of times says nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from peers.contenders import ours, plain
from peers.contenders.contender import Seat
from peers.gpt import Stream
from peers.memory import budget_of
from peers.ratios import agrees, difference
from peers.workload import (
    DDP,
    OURS_DENSE,
    OURS_SAMO,
    OURS_SAMO_MASK,
    OURS_SHARDED,
    PLAIN,
    PLAIN_MASKED,
    REFERENCES,
    SIZES,
    Case,
    Precision,
    Run,
    cases_for,
    missing_references,
)

from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld

TOLERANCE = {"fp32": 1e-6, "bf16": 2e-4}
"""Of so few steps: without weight decay, losses differ by 2e-6 and more in fp32."""
RUN = Run(PLAIN, replace(SIZES["tiny"], blocks=2, microbatches=4), "fp32", 3, 1)


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


def test_a_variant_is_a_setting(tmp_path: Path) -> None:
    samo, mask, sharded = (
        ours.configuration(replace(RUN, case=case), tmp_path).samo
        for case in (OURS_SAMO, OURS_SAMO_MASK, OURS_SHARDED)
    )

    assert (samo.index, mask.index) == ("auto", "mask")
    assert (mask.shard_optimizer, sharded.shard_optimizer) == (False, True)


@pytest.mark.parametrize(("size", "layers"), [("small", [6, 4]), ("wide", [3, 3])])
def test_splits_balance_the_products(size: str, layers: list[int]) -> None:
    assert SIZES[size].split(2) == layers


def test_every_layer_is_placed_once() -> None:
    size = SIZES["capped"]

    assert all(sum(size.split(stages)) == size.layers for stages in (1, 2, 3, 4))
    assert all(len(size.split(stages)) == stages for stages in (1, 2, 3, 4))


def test_the_sizes_are_what_they_are_called() -> None:
    assert SIZES["small"].parameters == pytest.approx(34e6, rel=0.02)
    assert SIZES["wide"].parameters == pytest.approx(67e6, rel=0.02)
    assert SIZES["small"].kept / SIZES["small"].parameters == pytest.approx(0.33, abs=0.005)


def test_the_references_run_whatever_the_layouts() -> None:
    keys = {case.key for case in cases_for(["2x2"], "bf16")}

    assert set(REFERENCES.values()) <= keys


def test_a_comparison_without_who_judges_it_is_incomplete() -> None:
    cases = cases_for(["1x2"], "bf16")
    unmasked = [case for case in cases if not case.is_masked]

    assert missing_references(cases) == []
    assert missing_references(cases[1:]) == [PLAIN.key]
    assert missing_references(cases[2:]) == [PLAIN.key, PLAIN_MASKED.key]
    assert missing_references(unmasked) == []


def test_a_run_survives_its_text() -> None:
    run = Run(DDP, SIZES["tiny"], "bf16", 3, 1, budget=5, mapped=True)

    assert Run.from_text(run.text()) == run


def test_the_cap_is_below_three_dense_stages_and_above_four_and_above_samo() -> None:
    size = SIZES["capped"]
    block = size.block_parameters * 16

    assert 2 * block < budget_of(size) < 3 * block
    # 3.6 bytes a pruned entry by docs/reference/memory.md, and a quarter for all else.
    assert 1.25 * 3.6 * size.parameters < budget_of(size)
