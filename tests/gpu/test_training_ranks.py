"""That the script which trains on a GPU is a fair one: on a CPU, it gives the oracle's bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu import ranks_training
from gpu.ranks_training import ON_CPU, CaseFailedError, case, joined, train_cases
from support.oracle import Oracle
from support.runs import tiny_config, tiny_gpt, token_data

STEPS = 3
SETTINGS = {"train": {"steps": STEPS}}


@pytest.mark.exhaustive
def test_members_leave_full_tensors_with_the_bits_of_one_stage(tmp_path: Path) -> None:
    cases = {
        layout: case(f"members {layout}", layout, {**SETTINGS, "model": {"num_heads": 4}})
        for layout in ((1, 1, 2), (2, 1, 2))
    }

    one, two = (train_cases(tmp_path, [own], ON_CPU)[own["name"]] for own in cases.values())

    assert not isinstance(one, CaseFailedError), one
    assert not isinstance(two, CaseFailedError), two
    assert (two[1]["losses"], two[1]["norms"]) == (one[0]["losses"], one[0]["norms"])
    for key in ("masters", "kept", "moments"):
        expected, found = joined(one, key), joined(two, key)
        # Two stages have one use of the tied weight each.
        second = {name for name in found if name.startswith("head.weight")}
        assert second and found.keys() - second == expected.keys()
        for name, values in found.items():
            first = name.replace("head.weight", "embed.token.weight")
            assert torch.equal(values, expected[first]), name


@pytest.mark.exhaustive
def test_a_job_trains_case_by_case_and_another_goes_on_behind_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_training, "AT_ONCE", 2)
    spoilt = {**SETTINGS, "precision": "fp16", "loss_scale": {"initial": 64.0}}
    outcomes = train_cases(
        tmp_path,
        [
            case("plain", (2, 1), SETTINGS),
            case("refused", (2, 1), {"layout": {"split": [1, 1]}}),
            case("overflow", (2, 1), spoilt, overflow_at=1),
        ],
        ON_CPU,
    )

    plain, rejected, overflow = (outcomes[name] for name in ("plain", "refused", "overflow"))
    config = tiny_config(**SETTINGS)
    oracle = Oracle(tiny_gpt(config), config, token_data(), 1)
    trace = oracle.run(STEPS)
    assert not isinstance(plain, CaseFailedError), plain
    for outcome in plain:
        assert (outcome["losses"], outcome["norms"]) == (trace.losses, trace.norms)
        assert outcome["devices"] == ["cpu"]
    masters, kept = joined(plain, "masters"), joined(plain, "kept")
    for name, values in masters.items():
        owner = name if name in trace.weights else "embed.token.weight"
        assert torch.equal(values, trace.weights[owner].reshape(-1)[kept[name]]), name
    assert len(kept["block0.fc1.weight"]) == oracle.masks["block0.fc1.weight"].sum()
    assert isinstance(rejected, CaseFailedError)
    assert "layout.split" in str(rejected)
    assert not isinstance(overflow, CaseFailedError), overflow
    for outcome in overflow:
        assert outcome["finite"] == [True, False, True]
        assert outcome["scale"] == 32.0
