"""Exact selection of the largest, against a stable sort, on the host and on a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import pretend_gpu
from support.pretend_gpu import AVAILABLE, pretend
from torch import Tensor

from axsparse.samo import selection
from axsparse.samo.index.base import make_index
from axsparse.samo.selection import (
    Candidates,
    Cut,
    Keys,
    by_magnitude,
    by_value,
    equal_to,
    find_cut,
    histogram,
    largest,
    select,
    strongest,
)

examples = settings(max_examples=60, deadline=None, derandomize=True)
few_values = st.lists(
    st.sampled_from([0.0, -0.0, 0.25, -0.25, 1.0, -1.0, float("inf"), float("-inf")]),
    min_size=1,
    max_size=60,
)
any_values = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=60)


def order_of(values: list[float], keys: Keys) -> list[int]:
    scores = [abs(value) if keys is by_magnitude else value for value in values]
    return sorted(range(len(values)), key=lambda at: (-scores[at], at))


@pytest.mark.parametrize("keys", [by_value, by_magnitude])
@pytest.mark.parametrize("size", [8, 131_072])
@examples
@given(st.one_of(few_values, any_values), st.data())
def test_the_largest_are_those_of_a_stable_sort(
    size: int, keys: Keys, values: list[float], data: st.DataObject
) -> None:
    keep = data.draw(st.integers(0, len(values)))

    scores = torch.tensor(values, dtype=torch.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selection, "CHUNK", size)
        mask = largest(scores, keep, keys)

    assert scores.tolist() == values
    assert mask.dtype == torch.bool
    assert mask.nonzero().view(-1).tolist() == sorted(order_of(values, keys)[:keep])


@examples
@given(st.lists(few_values, min_size=1, max_size=4), st.data())
def test_histograms_of_several_tensors_add_up_to_the_cut_of_all(
    tensors: list[list[float]], data: st.DataObject
) -> None:
    scores = [torch.tensor(values, dtype=torch.float32) for values in tensors]
    everything = torch.cat(scores)
    keep = data.draw(st.integers(0, everything.numel()))

    def count(upper: int | None) -> Tensor:
        return torch.stack([histogram(one, by_value, upper) for one in scores]).sum(0)

    cut = find_cut(count, keep)

    above = int(select(everything, by_value, Cut(cut.key, 0)).mask().sum())
    assert above + cut.ties == keep
    assert keep == 0 or 0 < cut.ties <= equal_to(everything, by_value, cut.key)
    assert torch.equal(select(everything, by_value, cut).mask(), largest(everything, keep))


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
