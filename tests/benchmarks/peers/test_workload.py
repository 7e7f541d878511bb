"""The comparison's models, splits and contenders."""

from __future__ import annotations

import pytest
from peers.cap import budget_of
from peers.workload import (
    DDP,
    PLAIN,
    PLAIN_MASKED,
    REFERENCES,
    SIZES,
    Run,
    cases_for,
    missing_references,
)


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


def test_variants_of_one_precision_stay_out_of_the_other() -> None:
    assert {case.only for case in cases_for(["1x2"], "fp32")} == {None}


def test_a_run_survives_its_text() -> None:
    run = Run(DDP, SIZES["tiny"], "bf16", 3, 1, budget=5, mapped=True)

    assert Run.from_text(run.text()) == run


def test_the_cap_is_below_three_dense_stages_and_above_four_and_above_samo() -> None:
    size = SIZES["capped"]
    block = size.block_parameters * 16

    assert 2 * block < budget_of(size) < 3 * block
    # 3.6 bytes a pruned entry by docs/reference/memory.md, and a quarter for all else.
    assert 1.25 * 3.6 * size.parameters < budget_of(size)
