"""Rounding of masters, over all kinds of bits."""

from __future__ import annotations

import math
import platform

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from axsparse.samo.precision import cpu_multiplies, round_to

BITS = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40)
LARGEST, INFINITY, SMALLEST = 0x7F7FFFFF, 0x7F800000, 1


@settings(max_examples=150, deadline=None, derandomize=True)
@given(BITS)
@example([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000])
@example([LARGEST, LARGEST - 2**31, INFINITY, INFINITY - 2**31, SMALLEST, 0, -(2**31)])
@example([0x3F808000, 0x3F807FFF, 0x3F808001, 0x3F818000])
def test_a_weight_is_the_nearest_to_its_master(bits: list[int]) -> None:
    """Rounding differs from torch's at ties only, and there goes away from zero."""
    masters = torch.tensor(bits, dtype=torch.int32).view(torch.float32)

    weight = round_to(masters, torch.bfloat16)

    number = ~masters.isnan()
    assert torch.equal(weight.isnan(), ~number)
    ties = ((masters.view(torch.int32) & 0xFFFF) == 0x8000) & number
    same = number & ~ties
    assert torch.equal(weight[same], masters[same].to(torch.bfloat16))
    assert (weight[ties].float().abs() > masters[ties].abs()).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_types_round_as_torch_does(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0004883, -3.1e-9, 7e4, math.inf])

    assert torch.equal(round_to(values, dtype), values.to(dtype))


@pytest.mark.parametrize(
    ("machine", "has_library", "supported", "expected"),
    [
        ("x86_64", True, (True, True), (True, True)),
        ("x86_64", True, (True, False), (True, False)),
        ("AMD64", True, (False, False), (False, False)),
        ("x86_64", False, (True, True), (False, False)),
        ("arm64", False, (False, False), (True, True)),
    ],
)
def test_the_types_that_a_cpu_multiplies(
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    has_library: bool,
    supported: tuple[bool, bool],
    expected: tuple[bool, bool],
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_library)
    for name, value in zip(("bf16", "fp16"), supported, strict=True):
        monkeypatch.setattr(
            torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda value=value: value
        )

    assert (cpu_multiplies(torch.bfloat16), cpu_multiplies(torch.float16)) == expected
    assert cpu_multiplies(torch.float32)
