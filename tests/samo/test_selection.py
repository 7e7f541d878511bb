"""Exact selection of the largest, against a stable sort, on the host and on a device."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from axsparse.samo import selection
from axsparse.samo.selection import (
    Keys,
    by_magnitude,
    by_value,
    counts_at,
    find_threshold,
    histogram,
    largest,
    select,
    unpack,
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
def test_histograms_of_several_tensors_add_up_to_the_threshold_of_all(
    tensors: list[list[float]], data: st.DataObject
) -> None:
    scores = [torch.tensor(values, dtype=torch.float32) for values in tensors]
    everything = torch.cat(scores)
    keep = data.draw(st.integers(0, everything.numel()))

    def count(upper: int | None) -> Tensor:
        return torch.stack([histogram(one, by_value, upper) for one in scores]).sum(0)

    threshold = find_threshold(count, keep)

    above, equal = counts_at(everything, by_value, threshold.key).tolist()
    assert above + threshold.ties == keep
    assert keep == 0 or 0 < threshold.ties <= equal
    selected = unpack(select(everything, by_value, threshold), everything.numel())
    assert torch.equal(selected, largest(everything, keep))
