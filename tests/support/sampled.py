"""Sparse products on any processor, of tensors of any size and type, with torch's bits."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from axsparse.samo import gradient_hooks
from axsparse.samo.index.base import Index
from axsparse.samo.tensor_state import TensorState
from axsparse.training import parts


def by_gather(outer: Tensor, inner: Tensor, index: Index) -> Tensor:
    """The kept entries of a product, out of the whole one as autograd computes it."""
    return index.gather(outer.t().mm(inner).reshape(-1), 0, index.kept)


def sample_all(patch: pytest.MonkeyPatch) -> None:
    """Have sparse products of all linear weights that are pruned at all, by torch's kernels."""

    def is_pruned(tensor: TensorState) -> bool:
        return tensor.kept < tensor.parameter.numel() and tensor.index.on_device is None

    patch.setattr(parts, "is_plain", lambda module: True)
    patch.setattr(gradient_hooks, "can_sample", is_pruned)
    patch.setattr(gradient_hooks, "may_be_sparse", lambda weight: weight.dim() == 2)
    patch.setattr(gradient_hooks, "sampled_product", by_gather)
    patch.setattr(gradient_hooks, "can_multiply", is_pruned)
    patch.setattr(gradient_hooks, "sparse_linear", nn.functional.linear)
    patch.setattr(gradient_hooks, "sparse_input_gradient", Tensor.mm)
    patch.setattr(gradient_hooks, "FEWEST_TOKENS", 0)
