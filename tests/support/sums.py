"""An accumulator of weight gradients by plain additions, and sparse products by torch's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from axsparse.samo import gradient_hooks
from axsparse.samo.gradient_hooks import GradientCollector
from axsparse.samo.index.base import Index
from axsparse.samo.tensor_state import TensorState


class Products:
    """Sparse products that take everything, by torch's kernels."""

    def __init__(self, weight: nn.Parameter, sums: Sums) -> None:
        self.weight, self._sums = weight, sums
        self.is_wanted = self.multiplies = self.accumulates = True
        self.outputs = self.input_gradients = self.calls = 0

    def output(self, rows: Tensor, bias: Tensor | None) -> Tensor | None:
        if not self.multiplies:
            return None
        self.outputs += 1
        return F.linear(rows, self.weight, bias)

    def input_gradient(self, outer: Tensor) -> Tensor:
        self.input_gradients += 1
        return outer.mm(self.weight)

    def accumulate(self, rows: Tensor, outer: Tensor) -> bool:
        if self.accumulates:
            self.calls += 1
            self._sums.put(self.weight, outer.t().mm(rows))
        return self.accumulates


class Sums:
    """An accumulator that adds dense gradients, microbatch by microbatch, or drops them."""

    def __init__(
        self, module: nn.Module, *, is_sparse: bool = False, is_dropping: bool = False
    ) -> None:
        self._is_dropping = is_dropping
        self.totals: dict[nn.Parameter, Tensor] = {}
        self._parts: dict[nn.Parameter, Tensor] = {}
        self.late: set[nn.Parameter] = set()
        """The weights that got a dense gradient by `add`."""
        self.completed: list[nn.Parameter] = []
        self.sparse = {
            weight: Products(weight, self)
            for weight in module.parameters()
            if is_sparse and weight.dim() == 2
        }
        self._deferring: dict[nn.Parameter, Callable[[nn.Parameter], bool]] = {}
        for weight in filter(lambda one: one.requires_grad, module.parameters()):
            weight.register_post_accumulate_grad_hook(self._hook)

    @property
    def collector(self) -> GradientCollector:
        """This, as what it stands in for."""
        return cast("GradientCollector", self)

    def _hook(self, tensor: Tensor) -> None:
        assert isinstance(tensor, nn.Parameter)
        if tensor in self._deferring and self._deferring[tensor](tensor):
            return
        if tensor.grad is not None:
            self.put(tensor, tensor.grad)
            tensor.grad = None
        self.complete(tensor)

    def put(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Add a part of the microbatch's gradient."""
        if not self._is_dropping:
            before = self._parts.get(weight)
            self._parts[weight] = gradient.clone() if before is None else before + gradient

    def complete(self, weight: nn.Parameter) -> None:
        self.completed.append(weight)
        if weight in self._parts:
            gradient, before = self._parts.pop(weight), self.totals.get(weight)
            self.totals[weight] = gradient if before is None else before + gradient

    def sparse_products(self, weight: nn.Parameter) -> Products | None:
        return self.sparse.get(weight)

    def add(self, weight: nn.Parameter, gradient: Tensor) -> None:
        self.late.add(weight)
        self.put(weight, gradient)

    def defer(
        self, weights: Iterable[nn.Parameter], is_deferred: Callable[[nn.Parameter], bool]
    ) -> None:
        self._deferring.update((weight, is_deferred) for weight in weights)


def by_gather(outer: Tensor, inner: Tensor, index: Index) -> Tensor:
    """The kept entries of a product, out of the full one as autograd computes it."""
    return index.gather(outer.t().mm(inner).reshape(-1), 0, index.kept)


def sample_all(patch: pytest.MonkeyPatch) -> None:
    """Have sparse products of all linear weights that are pruned at all, by torch's kernels."""

    def is_pruned(tensor: TensorState) -> bool:
        return tensor.kept < tensor.parameter.numel() and tensor.index.on_device is None

    patch.setattr(gradient_hooks, "can_sample", is_pruned)
    patch.setattr(gradient_hooks, "may_be_sparse", lambda weight: weight.dim() == 2)
    patch.setattr(gradient_hooks, "sampled_product", by_gather)
    patch.setattr(gradient_hooks, "can_multiply", is_pruned)
    patch.setattr(gradient_hooks, "sparse_linear", nn.functional.linear)
    patch.setattr(gradient_hooks, "sparse_input_gradient", Tensor.mm)
    patch.setattr(gradient_hooks, "FEWEST_TOKENS", 0)
