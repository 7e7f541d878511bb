"""Products of half-precision matrices by way of fp32."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from itertools import chain
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from axsparse.runtime import half_products
from axsparse.runtime.half_products import (
    HALVES,
    lacking_types,
    multiply_in_fp32,
    replaced_kernels,
)


@pytest.fixture
def replaced() -> Iterator[None]:
    """Every product in half precision goes by way of fp32, whatever this CPU has."""
    library = alone()
    yield
    library._destroy()


def alone() -> Library:
    """The kernels for all types, without those of an earlier test's run: torch 2.4 has room for
    one of each."""
    if half_products._library is not None:
        half_products._library._destroy()
        half_products._library = None
    return replaced_kernels(HALVES)


@pytest.fixture(params=[1 << 20, 200], ids=["whole", "pieces"])
def _size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_products, "PIECE", request.param)
    monkeypatch.setattr(half_products, "LEAST_LINES", 3)


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def check(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    """Sums may differ in their order, so that single values round to their neighbours."""
    assert found.dtype == dtype and found.is_contiguous()
    torch.testing.assert_close(found.float(), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


@pytest.mark.usefixtures("replaced", "_size")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("m", "k", "n"), [(5, 7, 3), (40, 9, 4), (3, 9, 50), (1, 30, 1), (0, 4, 3), (4, 0, 3)]
)
def test_matrices_are_multiplied_in_fp32_and_rounded_once(
    dtype: torch.dtype, m: int, k: int, n: int
) -> None:
    left, right, bias = (drawn(*shape, dtype=dtype) for shape in ((m, k), (n, k), (n,)))
    wide = left.float() @ right.float().t()

    check(left @ right.t(), wide, dtype)
    check(F.linear(left, right, bias), wide + bias.float(), dtype)
    found = torch.addmm(bias, left, right.t(), beta=0.5, alpha=2.0)
    check(found, 0.5 * bias.float() + 2.0 * wide, dtype)


@pytest.mark.usefixtures("replaced", "_size")
@pytest.mark.parametrize("dtype", HALVES)
def test_batches_of_matrices_too(dtype: torch.dtype) -> None:
    left, right = drawn(6, 5, 7, dtype=dtype), drawn(6, 4, 7, dtype=dtype)
    added = drawn(5, 4, dtype=dtype)
    wide = left.float() @ right.float().mT

    check(left @ right.mT, wide, dtype)
    check(torch.baddbmm(added, left, right.mT), added.float() + wide, dtype)


@pytest.mark.usefixtures("replaced")
def test_what_is_added_with_a_factor_of_zero_is_not_looked_at() -> None:
    found = torch.addmm(torch.full((2,), torch.nan).bfloat16(), drawn(3, 4), drawn(4, 2), beta=0)

    check(found, drawn(3, 4).float() @ drawn(4, 2).float(), torch.bfloat16)


@pytest.mark.usefixtures("replaced")
def test_gradients_are_products_too() -> None:
    inputs, weight = drawn(2, 5, 8).requires_grad_(), drawn(6, 8).requires_grad_()
    F.linear(inputs, weight).backward(drawn(2, 5, 6))
    assert inputs.grad is not None and weight.grad is not None

    wide = drawn(2, 5, 6).float()
    flat = wide.flatten(0, 1)
    check(inputs.grad, wide @ weight.detach().float(), torch.bfloat16)
    check(weight.grad, flat.t() @ inputs.detach().float().flatten(0, 1), torch.bfloat16)


@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("shape", "weight", "has_bias", "settings"),
    [
        ((2, 4, 9, 8), (6, 4, 3, 3), True, {"padding": 1, "stride": (2, 1)}),
        ((1, 4, 5, 5), (6, 4, 1, 1), False, {}),
        ((2, 4, 6, 6), (6, 2, 3, 3), True, {"groups": 2}),
        ((2, 4, 11), (5, 4, 3), True, {"padding": 2}),
    ],
)
def test_convolutions_and_their_gradients_too(
    dtype: torch.dtype,
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    has_bias: bool,
    settings: dict[str, Any],
) -> None:
    convolve: Any = F.conv2d if len(shape) == 4 else F.conv1d

    def computed(wide: bool) -> list[Tensor]:
        shapes = (shape, weight, weight[:1])[: 2 + has_bias]
        tensors = [drawn(*each, dtype=dtype) for each in shapes]
        tensors = [(each.float() if wide else each).requires_grad_() for each in tensors]
        outputs = convolve(*tensors, **settings)
        outputs.backward(torch.ones_like(outputs))
        return [outputs.detach(), *(each.grad for each in tensors if each.grad is not None)]

    for found, wanted in zip(computed(wide=False), computed(wide=True), strict=True):
        check(found, wanted, dtype)


@pytest.mark.usefixtures("replaced")
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_a_convolution_returns_only_the_gradients_that_are_wanted(dtype: torch.dtype) -> None:
    backward: Any = torch.ops.aten._slow_conv2d_backward.output_mask
    shapes = ((2, 4, 3, 3), (2, 3, 5, 5), (4, 3, 3, 3))
    gradient, inputs, weight = (drawn(*shape, dtype=dtype) for shape in shapes)

    found = backward(gradient, inputs, weight, (3, 3), (1, 1), (0, 0), (False, True, False))

    assert found[0] is None and found[2] is None
    assert (found[1].shape, found[1].dtype) == (weight.shape, dtype)


def test_other_types_keep_their_bits_and_errors() -> None:
    def products(dtype: torch.dtype) -> list[Tensor]:
        left, right = drawn(5, 40, dtype=dtype), drawn(40, 3, dtype=dtype)
        three = drawn(2, 5, 40, dtype=dtype)
        return [
            left @ right,
            torch.addmm(left[0, :3], left, right, alpha=2),
            three @ right.expand(2, 40, 3),
            torch.baddbmm(left[:, :3], three, right.expand(2, 40, 3), beta=3),
        ]

    def convolutions() -> list[Tensor]:
        shapes = ((2, 4, 7, 7), (6, 4, 3, 3), (6,))
        tensors = [drawn(*each, dtype=torch.float64).requires_grad_() for each in shapes]
        outputs = F.conv2d(tensors[0], tensors[1], tensors[2], padding=1)
        outputs.square().sum().backward()
        frozen = F.conv2d(tensors[0].detach(), tensors[1].detach())
        return [outputs.detach(), frozen, *(each.grad for each in tensors if each.grad is not None)]

    def everything() -> list[Tensor]:
        types = (torch.float32, torch.float64, torch.complex64)
        return [*chain(*map(products, types)), *convolutions()]

    before = everything()
    library = alone()
    try:
        after = everything()
        with pytest.raises(RuntimeError, match="same dtype"):
            drawn(2, 2) @ drawn(2, 2, dtype=torch.float32)
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            drawn(2, 3, dtype=torch.float32) @ drawn(2, 3, dtype=torch.float32)
    finally:
        library._destroy()

    assert len(before) == 4 * 3 + 5
    for old, new in zip(before, after, strict=True):
        assert torch.equal(old, new) and old.stride() == new.stride()


@pytest.mark.parametrize(
    ("machine", "has_library", "supported", "expected"),
    [
        ("x86_64", True, (True, True), ()),
        ("x86_64", True, (True, False), (torch.float16,)),
        ("AMD64", True, (False, False), HALVES),
        ("x86_64", False, (True, True), HALVES),
        ("arm64", False, (False, False), ()),
    ],
)
def test_only_cpus_are_helped_that_lack_a_type(
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    has_library: bool,
    supported: tuple[bool, bool],
    expected: tuple[torch.dtype, ...],
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_library)
    for name, value in zip(("bf16", "fp16"), supported, strict=True):
        monkeypatch.setattr(
            torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", lambda value=value: value
        )

    assert lacking_types() == expected


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.bfloat16, True), (torch.float16, False), (torch.float32, False)]
)
def test_kernels_are_replaced_once_and_only_for_a_run_that_needs_them(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, expected: bool
) -> None:
    made: list[tuple[torch.dtype, ...]] = []

    def replaced_types(lacking: tuple[torch.dtype, ...]) -> object:
        made.append(lacking)
        return made

    monkeypatch.setattr(half_products, "_library", None)
    monkeypatch.setattr(half_products, "lacking_types", lambda: (torch.bfloat16,))
    monkeypatch.setattr(half_products, "replaced_kernels", replaced_types)

    assert [multiply_in_fp32(dtype), multiply_in_fp32(dtype)] == [expected, expected]
    assert made == [(torch.bfloat16,)] * expected
