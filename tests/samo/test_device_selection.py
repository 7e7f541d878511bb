"""A device chooses the same entries as the host, and sends no more than these."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import pretend_gpu
from support.pretend_gpu import AVAILABLE, pretend
from torch import Tensor

from axsparse.samo import device_selection
from axsparse.samo.device_selection import largest_magnitudes
from axsparse.samo.growth_candidates import Candidates, strongest
from axsparse.samo.index.base import make_index

FEW_VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.5, math.nan, 1e-40, -3.0e38])


def by_sorting(scores: Tensor, keep: int) -> Tensor:
    keys = torch.where(scores.isnan(), -1.0, scores.abs())
    return torch.sort(keys, descending=True, stable=True).indices[:keep].sort().values


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data(), st.integers(1, 60))
def test_what_is_chosen_is_what_sorting_finds(data: st.DataObject, numel: int) -> None:
    scores = torch.tensor(data.draw(st.lists(FEW_VALUES, min_size=numel, max_size=numel)))
    keep = data.draw(st.integers(0, numel))

    assert torch.equal(largest_magnitudes(scores, keep), by_sorting(scores, keep))


def test_pieces_are_chosen_from_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_selection, "PIECE", 7)
    scores = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    scores[::3] = 0.5  # many equal ones, over all pieces

    for keep in (1, 300, 500, 999, 1000):
        assert torch.equal(largest_magnitudes(scores, keep), by_sorting(scores, keep))


@pytest.mark.skipif(not AVAILABLE, reason="this torch knows no device written in Python")
def test_growth_chooses_on_the_device_and_fetches_what_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numel, count = 300_000, 100
    values = torch.randn(numel, generator=torch.Generator().manual_seed(2))
    part = Candidates(torch.tensor([5, 6], dtype=torch.int32), torch.tensor([90.0, -90.0]))
    there = values.to(pretend())
    index = make_index(torch.zeros(numel, dtype=torch.bool), "int32")
    fetched: list[int] = []
    run = pretend_gpu._run

    def watched(operation: Any, arguments: Any, named: dict[str, Any]) -> Any:
        made = run(operation, arguments, named)
        to_host = "_to_copy" in operation.name() and type(made) is Tensor
        if to_host:
            fetched.append(made.numel())
        return made

    monkeypatch.setattr(pretend_gpu, "_run", watched)
    ours = strongest(there, [part], index, count)
    theirs = strongest(values.clone(), [part], index, count)

    assert torch.equal(ours.positions, theirs.positions)
    assert torch.equal(ours.sums, theirs.sums)
    assert fetched and max(fetched) <= 65_536 < numel
