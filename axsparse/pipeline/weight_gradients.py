"""Deferral of the gradients of a stage's linear and convolution weights: who computes them, and
when.

A backward computes gradients of activations, and of weights. Of the plain modules of a stage
(`models/module_products.py`) the gradient of the weight can be taken out of the backward:

- where backwards are split, the two factors of this gradient are saved, and `DeferredGradients.run`
  multiplies them in the action W of their microbatch;
- of a mostly pruned weight only the kept entries of the gradient are computed, at once in an
  unsplit backward and in W in a split one. The layer's other two products are then computed from
  the kept entries of the weight;
- where something else is awaited in the backward, such as a sum over ranks, the factors of some
  modules are saved too, and multiplied meanwhile.

Any other gradient of such a weight, from a penalty or from another use of the weight, comes through
autograd and is added. Where backwards are split, this gradient waits for W as well, so that
gradients are added in the order of the microbatches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor, nn

from axsparse.models.module_products import forwards_in_place, has_products, product_forward
from axsparse.models.sequential import is_compiled
from axsparse.runtime.communication import Work
from axsparse.samo.gradient_hooks import GradientCollector, SparseWeight


@dataclass(frozen=True)
class Deferred:
    """The gradients of one product's weights, before they are computed."""

    sparse: SparseWeight | None
    """Computes kept entries alone, where enough of the weight is pruned; None if it never does."""
    weights: tuple[nn.Parameter, ...]
    saved: tuple[Tensor, ...]
    compute: Callable[..., list[Tensor]]
    """Makes the gradients of `weights` from the saved tensors."""

    def gradients(self) -> list[Tensor]:
        """The dense gradients; none if just the kept entries could be accumulated."""
        if self.sparse is not None and self.sparse.accumulate(*self.saved):
            return []
        return self.compute(*self.saved)


@dataclass
class _Waiting:
    """The deferred gradients of one microbatch."""

    each: deque[Deferred] = field(default_factory=deque)
    """The gradients that are not computed yet, in the order of the backward."""
    left: Counter[nn.Parameter] = field(default_factory=Counter)
    """How many gradients of each weight are not computed yet."""
    sums: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    """The sum of the computed gradients of weights that have further ones."""
    arrived: set[nn.Parameter] = field(default_factory=set)
    """The weights of which the backward will defer no further gradient."""


class DeferredGradients:
    """The weight gradients of one stage that are deferred, by microbatch."""

    def __init__(self, collector: GradientCollector) -> None:
        self._collector = collector
        self._waiting: dict[int, _Waiting] = {}
        self._current: _Waiting | None = None

    def __len__(self) -> int:
        """How many microbatches wait for their weight gradients."""
        return len(self._waiting)

    @contextmanager
    def backward_of(self, microbatch: int) -> Iterator[None]:
        """Assign the gradients that are deferred inside this block to this microbatch."""
        self._waiting[microbatch] = self._current = _Waiting()
        try:
            yield
        finally:
            self._current = None

    def arrive(self, weight: nn.Parameter) -> bool:
        """Note that the current backward has made all gradients of a weight; returns whether it has
        deferred any, so that autograd's gradient in the weight has to wait as well."""
        current = self._current
        if current is None or weight not in current.left:
            return False
        if weight.grad is not None:
            self.append(Deferred(None, (weight,), (weight.grad,), lambda gradient: [gradient]))
            weight.grad = None
        current.arrived.add(weight)
        return True

    def append(self, deferred: Deferred) -> None:
        """Defer gradients to the `run` of the microbatch whose backward runs."""
        assert self._current is not None, "no backward runs"
        self._current.each.append(deferred)
        self._current.left.update(deferred.weights)

    @torch.no_grad()
    def run(self, microbatch: int) -> None:
        """Compute the gradients of one microbatch, and hand each to the collector.

        Products of one weight are added in the order in which the backward reached them, as
        autograd adds them. The tensors that a product has saved are freed once they are used.
        """
        waiting = self._waiting.pop(microbatch)
        while waiting.each:
            self._compute(waiting, 0)

    @torch.no_grad()
    def run_next(self) -> bool:
        """Compute one gradient of a weight that gets no further one in the backward that runs;
        returns whether there was one.

        There is none while an earlier microbatch waits, whose gradients have to be added first.
        """
        current = self._current
        if current is None or len(self._waiting) > 1:
            return False
        for place, deferred in enumerate(current.each):
            if current.arrived.issuperset(deferred.weights):
                del deferred
                self._compute(current, place)
                return True
        return False

    def _compute(self, waiting: _Waiting, place: int) -> None:
        deferred = waiting.each[place]
        del waiting.each[place]
        weights, gradients = deferred.weights, deferred.gradients()
        del deferred
        sums = waiting.sums
        for weight in weights:
            if gradients:
                gradient = gradients.pop(0)
                sums[weight] = sums.pop(weight) + gradient if weight in sums else gradient
                del gradient
            waiting.left[weight] -= 1
            if not waiting.left[weight]:
                if weight in sums:
                    self._collector.add(weight, sums.pop(weight))
                self._collector.complete(weight)


class WeightProducts:
    """The products of one module, and the way of the gradient of its weight."""

    def __init__(
        self,
        weight: nn.Parameter,
        sparse: SparseWeight | None,
        stage: StageProducts,
        deferred: DeferredGradients | None,
    ) -> None:
        """`sparse` computes the products from kept entries, where enough of the weight is pruned;
        None if this weight never has such products. `deferred` takes gradients that wait; None
        where they do not."""
        self.weight = weight
        self.sparse = sparse
        self.deferred = deferred
        self._stage = stage

    def output(self, rows: Tensor, bias: Tensor | None) -> Tensor | None:
        return None if self.sparse is None else self.sparse.output(rows, bias)

    def input_gradient(self, outer: Tensor) -> Tensor:
        assert self.sparse is not None
        return self.sparse.input_gradient(outer)

    def take(
        self,
        weights: Sequence[nn.Parameter],
        saved: tuple[Tensor, Tensor],
        compute: Callable[..., list[Tensor]],
    ) -> list[Tensor | None]:
        """Defer the gradients, or accumulate their kept entries; None for each that is taken.

        A weight on which others than the collector have hooks keeps its gradient in autograd, where
        those hooks expect it. So does every weight in a backward that a layer starts by itself,
        which belongs to no microbatch.
        """
        if self._stage.is_in_backward and not any(map(_has_hooks, weights)):
            if self.deferred is not None:
                self.deferred.append(Deferred(self.sparse, tuple(weights), saved, compute))
                return [None] * len(weights)
            if self.sparse is not None and self.sparse.accumulate(*saved):
                return [None]
        return list(compute(*saved))


class StageProducts:
    """The products of all plain modules of a stage."""

    def __init__(
        self,
        layers: Iterable[nn.Module],
        collector: GradientCollector,
        *,
        is_split: bool,
        deferring: Set[nn.Module] = frozenset(),
    ) -> None:
        """If backwards are not split, only two kinds of modules take part: modules whose weight may
        have sparse products, and modules in `deferring`, whose gradients `compute_deferred` may
        compute."""
        self.is_in_backward = False
        self._is_split = is_split
        self.deferred = DeferredGradients(collector) if is_split or deferring else None
        self._products: dict[nn.Module, WeightProducts] = {}
        for each in chain.from_iterable(map(_uncompiled, layers)):
            if not has_products(each):
                continue
            weight = each._parameters["weight"]
            assert isinstance(weight, nn.Parameter)
            sparse = collector.sparse_products(weight) if isinstance(each, nn.Linear) else None
            deferred = self.deferred if is_split or each in deferring else None
            if deferred is not None or sparse is not None:
                self._products[each] = WeightProducts(weight, sparse, self, deferred)
        self._forwards: dict[nn.Module, Callable[..., object]] = {}
        if self.deferred is not None:
            collector.defer(self._weights(), self.deferred.arrive)

    def __len__(self) -> int:
        """How many modules may take part."""
        return len(self._products)

    def begin_step(self) -> None:
        """See which modules take part in the step that begins. Called while no microbatch is in
        flight, since forward and backward have to see the same."""
        self._forwards = {
            module: product_forward(module, products)
            for module, products in self._products.items()
            if products.deferred is not None
            or (products.sparse is not None and products.sparse.is_wanted)
        }

    def in_place(self) -> AbstractContextManager[None]:
        """A block in which the modules' forwards call the products."""
        return forwards_in_place(self._forwards)

    @contextmanager
    def backward_of(self, microbatch: int) -> Iterator[None]:
        """The backward of a microbatch; forwards that it recomputes call the products as well."""
        deferred = self.deferred
        deferring = nullcontext() if deferred is None else deferred.backward_of(microbatch)
        self.is_in_backward = True
        try:
            with self.in_place(), deferring:
                yield
            if deferred is not None and not self._is_split:
                deferred.run(microbatch)
        finally:
            self.is_in_backward = False

    def compute_deferred(self, work: Work) -> None:
        """Compute weight gradients while some work is under way: as many as wait in an unsplit
        backward, and in a split one until the work is done."""
        if self.deferred is None:
            return
        while (not work.poll() or not self._is_split) and self.deferred.run_next():
            pass

    def _weights(self) -> Iterator[nn.Parameter]:
        """The weights that may be deferred, and the biases of convolutions with them."""
        for module, products in self._products.items():
            if products.deferred is None:
                continue
            yield products.weight
            bias = module._parameters.get("bias")
            if bias is not None and not isinstance(module, nn.Linear):
                yield bias


def _uncompiled(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all below it, less those that torch.compile runs."""
    if module._compiled_call_impl is None and not is_compiled(module):
        yield module
        for child in module.children():
            yield from _uncompiled(child)


def _has_hooks(weight: nn.Parameter) -> bool:
    """Whether a weight has hooks other than the collector's."""
    hooks = weight._post_accumulate_grad_hooks or ()
    return bool(weight._backward_hooks) or len(hooks) > 1
