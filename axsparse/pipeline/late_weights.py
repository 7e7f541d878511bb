"""Weight gradients that a backward leaves for later, microbatch by microbatch.

A split backward computes gradients of activations. For each weight of a matrix product it leaves
what the weight's gradient is made of: the product's input and its output's gradient. `run` makes
the gradients of one microbatch and hands them to autograd, so that everything that hangs on a
parameter (hooks, accumulation, compression) works as after a whole backward. A weight with sparse
products gets none: just the entries that are kept are computed.

A backward that is not split leaves only what goes to sparse products, and nothing of it waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from axsparse.runtime.errors import ConfigError


class SparseProducts(Protocol):
    """Computes the products of a linear layer from those entries of its weight that are kept."""

    @property
    def is_wanted(self) -> bool:
        """Whether it takes any product of the step that begins."""
        ...

    @property
    def multiplies(self) -> bool:
        """Whether it takes outputs and gradients of inputs in the step that begins."""
        ...

    def takes(self, rows: Tensor, bias: Tensor | None) -> bool:
        """Whether it is made for an input `(tokens, inputs)` and bias like these."""
        ...

    def output(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """The output `(tokens, outputs)` of an input that it takes."""
        ...

    def input_gradient(self, outer: Tensor) -> Tensor:
        """The gradient of that input, of the output's gradient `(tokens, outputs)`."""
        ...

    def accumulate(self, rows: Tensor, outer: Tensor) -> bool:
        """Accumulate the kept entries of the weight's gradient, of the input `(tokens, inputs)` and
        the output's gradient `(tokens, outputs)` of the only call in a microbatch; False, having
        done nothing, if the whole gradient is wanted."""
        ...


class LateGradient:
    """The gradients of one product's weights, before they are computed."""

    __slots__ = ("_versions", "compute", "held", "is_part", "name", "sparse", "weights")

    def __init__(
        self,
        name: str,
        weights: tuple[nn.Parameter, ...],
        held: tuple[Tensor, ...],
        compute: Callable[..., Sequence[Tensor]],
        *,
        sparse: SparseProducts | None = None,
        is_part: bool = False,
    ) -> None:
        """`compute(*held)` makes the gradients of `weights`; `name` is the first weight's, for
        errors. `sparse` may accumulate what is kept in its place, unless `is_part` says that the
        weight has further gradients in this microbatch."""
        self.name = name
        self.sparse = None if is_part else sparse
        self.is_part = is_part
        self.weights = weights
        self.held = held
        self.compute = compute
        self._versions = [tensor._version for tensor in held]

    def accumulate_kept(self) -> bool:
        """Accumulate just the kept entries, if that is possible, and return whether it was;
        ConfigError like `gradients`."""
        if self.sparse is None:
            return False
        self._check()
        return self.sparse.accumulate(*self.held)

    def gradients(self) -> list[Tensor]:
        """The gradients; ConfigError if what they are made of has been written to."""
        self._check()
        return list(self.compute(*self.held))

    def _check(self) -> None:
        if self._versions != [tensor._version for tensor in self.held]:
            raise ConfigError(
                f"layer weight {self.name}: an activation or its gradient was written to between "
                "the backward and the gradient of the weight; write to copies, or set "
                "pipeline.split_backward to false"
            )


class LateWeights:
    """The weight gradients of one stage that wait."""

    def __init__(self, *, is_split: bool = True) -> None:
        """Where backwards are not split, what waits is handed on at the latest at their end."""
        self._is_split = is_split
        self._waiting: dict[int, list[LateGradient]] = {}
        """By microbatch, in the order of the backward."""
        self._current: int | None = None
        """The microbatch whose backward runs."""
        self._came_early: set[nn.Parameter] = set()
        """Watched weights whose gradient this backward has made itself."""
        self._handed_on: set[nn.Parameter] = set()
        """Weights whose gradient this backward has not left for later."""

    def __len__(self) -> int:
        """How many microbatches wait for their weight gradients."""
        return len(self._waiting)

    @property
    def nbytes(self) -> int:
        """Bytes of the inputs and output gradients that wait; each storage counts once."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for each in self._waiting.values()
            for late in each
            for tensor in late.held
        }
        return sum(storages.values())

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward runs."""
        return self._current is not None

    @contextmanager
    def backward_of(self, microbatch: int) -> Iterator[None]:
        """What products leave inside this block belongs to this microbatch."""
        self._waiting[microbatch] = []
        self._current = microbatch
        try:
            yield
        finally:
            self._current = None
            self._came_early.clear()
            self._handed_on.clear()
        if not self._is_split:
            self.run(microbatch)

    def leave(self, late: LateGradient) -> None:
        """Keep a gradient for the `run` of the microbatch whose backward runs, or make it now.

        Outside a backward nothing is kept: a forward that asks autograd for the gradient of an
        activation wants none of a weight.
        """
        if self._current is None:
            return
        done = self._came_early | self._handed_on
        if done and not done.isdisjoint(late.weights):
            raise _used_elsewhere(late.name)
        if self._is_split or late.is_part:
            self._waiting[self._current].append(late)
        else:
            if not late.accumulate_kept():
                _give(late.gradients(), *late.weights)
            self._handed_on.update(late.weights)

    def watch(self, name: str, weight: nn.Parameter) -> None:
        """Refuse gradients that a backward makes of this weight while others of it wait.

        They would be added in another order than by a whole backward, and too early.
        """

        def refuse(weight: Tensor) -> None:
            if self._current is None:
                return
            assert isinstance(weight, nn.Parameter)
            self._came_early.add(weight)
            waiting = (late for each in self._waiting.values() for late in each)
            if weight in self._handed_on or any(
                weight is other for late in waiting for other in late.weights
            ):
                raise _used_elsewhere(name)

        weight.register_post_accumulate_grad_hook(refuse)

    @torch.no_grad()
    def run(self, microbatch: int) -> None:
        """Compute the gradients of one microbatch, one weight after the other, and hand each on.

        Each weight gets one gradient. Products of one weight are added in the order in which the
        backward reached them, as autograd adds them. What a product held is freed once used.
        """
        waiting = self._waiting.pop(microbatch)
        left = Counter(weight for late in waiting for weight in late.weights)
        sums: dict[nn.Parameter, Tensor] = {}
        waiting.reverse()
        while waiting:
            late = waiting.pop()
            if late.accumulate_kept():
                continue
            gradients, weights = late.gradients(), late.weights
            del late
            for weight in weights:
                # A list hands the gradient on, since autograd copies one that somebody else holds.
                box = [gradients.pop(0)]
                if weight in sums:
                    box.append(sums.pop(weight) + box.pop())
                left[weight] -= 1
                if left[weight]:
                    sums[weight] = box.pop()
                else:
                    _give(box, weight)


class _Give(torch.autograd.Function):
    """A scalar whose backward gives a weight the gradient in `box`."""

    @staticmethod
    def forward(ctx: Any, box: list[Tensor], weight: Tensor) -> Tensor:
        ctx.box = box
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, ctx.box.pop()


def _give(box: list[Tensor], weight: nn.Parameter) -> None:
    """Accumulate the gradient in `box` as autograd does, and call the weight's hooks.

    Without a hook on the gradient itself this takes no round through autograd, which costs as much
    as a small product.
    """
    if weight._backward_hooks:
        # The gradient hooks need this thread's stream and device, so autograd runs in it.
        with torch.enable_grad(), torch.autograd.set_multithreading_enabled(False):
            start: Callable[..., Tensor] = _Give.apply
            start(box, weight).backward()
        return
    if weight.grad is not None:
        weight.grad.add_(box.pop())
    elif box[0].stride() == weight.stride():
        weight.grad = box.pop()
    else:
        weight.grad = torch.empty_like(weight).copy_(box.pop())
    for hook in list((weight._post_accumulate_grad_hooks or {}).values()):
        hook(weight)


def _used_elsewhere(name: str) -> ConfigError:
    return ConfigError(
        f"layer weight {name}: it is used outside linear and convolution calls, and was not in the "
        "first microbatch; use it alike in every microbatch, or set pipeline.split_backward and "
        "samo.sparse_products to false"
    )
