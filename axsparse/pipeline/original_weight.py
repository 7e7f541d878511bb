"""The weight that a stand-in stands in for: what is known of its use, and who computes with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from axsparse.pipeline.late_weights import LateGradient, LateWeights, SparseProducts

Compute = Callable[..., Sequence[Tensor]]


@dataclass
class OriginalWeight:
    """The weight that a stand-in stands in for."""

    name: str
    weight: nn.Parameter
    alias: Tensor
    """The same memory, without a gradient."""
    late: LateWeights
    """Where its gradients go."""
    sparse: SparseProducts | None = None
    """What may compute its products from kept entries, if anything."""
    multiplies: bool = False
    """Whether that computes outputs and input gradients in the present step."""
    hooks: int = 0
    """How many hooks of the package wait for its gradients."""
    is_used_otherwise: bool = False
    """Whether it is used in a way that is not split, so that autograd makes a gradient of it."""
    calls: int = 0
    """How often the present forward, or part of one that is recomputed, has used it in products."""
    is_used_often: bool = False
    """Whether a forward has used it in several products."""

    def leave(
        self, held: tuple[Tensor, ...], compute: Compute, biases: Sequence[OriginalWeight] = ()
    ) -> None:
        """Leave gradients of this weight and of biases for later; `compute` makes them of
        `held`."""
        weights = (self.weight, *[bias.weight for bias in biases])
        late = LateGradient(
            self.name,
            weights,
            held,
            compute,
            sparse=None if self._is_watched() else self.sparse,
            is_part=self.sparse is not None and self.is_part,
        )
        self.late.leave(late)

    @property
    def is_part(self) -> bool:
        """Whether what a product leaves may be a part of a microbatch's gradient."""
        return self.is_used_otherwise or self.is_used_often

    def begin_step(self) -> bool:
        """Note which products of the step that begins are sparse, and return whether any is."""
        self.multiplies = self.sparse is not None and self.sparse.multiplies
        return self.sparse is not None and self.sparse.is_wanted

    def takes(self, rows: Tensor, bias: Tensor | None) -> bool:
        """Whether the products of an input and its gradient are sparse."""
        return self.multiplies and self.sparse is not None and self.sparse.takes(rows, bias)

    def output(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """y = x Wᵀ + b, without a gradient of W."""
        if self.takes(rows, bias):
            assert self.sparse is not None
            return self.sparse.output(rows, bias)
        return F.linear(rows, self.alias, bias)

    def use(self) -> None:
        """Note a use in a product, for sparse products."""
        if self.sparse is not None:
            self.calls += 1
            self.is_used_often |= self.calls > 1

    def _is_watched(self) -> bool:
        """Whether hooks of others wait for whole gradients."""
        hooks = self.weight._post_accumulate_grad_hooks or ()
        return bool(self.weight._backward_hooks) or len(hooks) > self.hooks
