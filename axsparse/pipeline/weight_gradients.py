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
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from axsparse.models.module_products import forwards_in_place, has_products, product_forward
from axsparse.models.sequential import is_compiled
from axsparse.runtime.communication import Work
from axsparse.samo.gradient_hooks import GradientCollector, SparseWeight
from axsparse.samo.masks import sums_of_bits


@dataclass(frozen=True)
class Deferred:
    """The gradients of one product's weights, before they are computed."""

    products: WeightProducts | None
    """The products of the module that multiplied; None for a gradient that autograd has made."""
    weights: tuple[nn.Parameter, ...]
    saved: tuple[Tensor, ...]
    compute: Callable[..., list[Tensor]]
    """Makes the gradients of `weights` from the saved tensors."""

    def gradients(self) -> list[Tensor]:
        """The dense gradients; none if just the kept entries could be accumulated."""
        sparse = None if self.products is None else self.products.sparse
        if sparse is not None and sparse.accumulate(*self.saved):
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
        """The deferred gradients of the current backward."""

    def __len__(self) -> int:
        """How many microbatches wait for their weight gradients."""
        return len(self._waiting)

    @contextmanager
    def backward_of(self, microbatch: int) -> Iterator[None]:
        """Assign the gradients that are deferred inside this block to this microbatch."""
        waiting = self._waiting[microbatch] = self._current = _Waiting()
        try:
            yield
        finally:
            self._current = None
        for deferred in waiting.each:
            products = deferred.products
            if products is not None and products.is_alone is None:
                products.is_alone = waiting.left[products.weight] == 1 or None

    def has(self, weight: nn.Parameter) -> bool:
        """Whether any gradient of a weight waits."""
        return any(waiting.left[weight] for waiting in self._waiting.values())

    def arrive(self, weight: nn.Parameter) -> bool:
        """Note that the current backward has made all gradients of a weight; returns whether it has
        deferred any, so that autograd's gradient in the weight has to wait as well."""
        current = self._current
        if current is None or weight not in current.left:
            return False
        if weight.grad is not None:
            self.append(None, (weight,), (weight.grad,), lambda gradient: [gradient])
            weight.grad = None
        current.arrived.add(weight)
        return True

    def append(
        self,
        products: WeightProducts | None,
        weights: tuple[nn.Parameter, ...],
        saved: tuple[Tensor, ...],
        compute: Callable[..., list[Tensor]],
    ) -> None:
        """Defer gradients to the `run` of the microbatch whose backward runs."""
        assert self._current is not None, "no backward runs"
        self._current.each.append(Deferred(products, weights, saved, compute))
        self._current.left.update(weights)

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
        """Compute one gradient of the backward that runs, which is all that its weight gets in it;
        returns whether there was one.

        There is none while an earlier microbatch waits, whose gradients have to be added first.
        """
        current = self._current
        if current is None or len(self._waiting) > 1:
            return False
        for place, deferred in enumerate(current.each):
            products = deferred.products
            if products is not None and products.is_alone and products.weight in current.arrived:
                del deferred
                self._compute(current, place)
                return True
        return False

    def _compute(self, waiting: _Waiting, place: int) -> None:
        """Compute the deferred gradients at this place, and collect complete weights."""
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


_Bits = tuple[torch.Size, torch.dtype, Tensor]
"""The shape, the type and sums of the bits of a dense tensor, by which it is known again."""


def _bits_of(tensor: Tensor) -> _Bits:
    return tensor.shape, tensor.dtype, sums_of_bits(tensor)


def _has_bits(tensor: Tensor, bits: _Bits) -> bool:
    """Whether a tensor has these bits, NaNs included."""
    if tensor.layout is not torch.strided or (tensor.shape, tensor.dtype) != bits[:2]:
        return False
    return torch.equal(bits[2], sums_of_bits(tensor))


class WeightProducts:
    """The products of one module, and the way of the gradient of its weight."""

    def __init__(
        self,
        name: str,
        weight: nn.Parameter,
        sparse: SparseWeight | None,
        stage: StageProducts,
        deferred: DeferredGradients | None,
    ) -> None:
        """`name` is the weight's, for errors. `sparse` computes the products from kept entries,
        where enough of the weight is pruned; None if this weight never has such products.
        `deferred` takes gradients that wait; None where they do not."""
        self.name = name
        self.weight = weight
        self.sparse = sparse
        self.is_alone: bool | None = None
        """Whether a microbatch's gradient comes from one call; None until a backward shows it."""
        self._stage = stage
        self.deferred = deferred
        self.first: dict[nn.Parameter, _Bits | None] = {}
        """The gradients of the first call in the backward that shows it, until they are compared
        with the gradients that autograd has accumulated. Of each gradient sums alone: autograd
        would copy a gradient that is also held here."""

    def output(self, rows: Tensor, bias: Tensor | None) -> Tensor | None:
        if self.sparse is None or not self.sparse.takes(rows, bias):
            return None
        return self.sparse.output(rows, bias)

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
        stage = self._stage
        if stage.is_in_backward and not any(map(_has_hooks, weights)):
            if self.deferred is None:
                if self.sparse is not None and self.sparse.accumulate(*saved):
                    return [None]
            elif self._is_deferred(self.deferred):
                self.deferred.append(self, tuple(weights), saved, compute)
                return [None] * len(weights)
            elif self.is_alone is None:
                return self._first_gradients(weights, compute(*saved))
        return list(compute(*saved))

    def _is_deferred(self, deferred: DeferredGradients) -> bool:
        """Whether the gradient of a call waits. Autograd makes the first one of a weight, which
        shows whether it has others; those autograd adds in its own order, as in an unsplit
        backward."""
        if self.is_alone is None:
            is_sparse = self.sparse is not None and self.sparse.is_wanted
            return is_sparse or deferred.has(self.weight)
        return self.is_alone

    def _first_gradients(
        self, weights: Sequence[nn.Parameter], gradients: list[Tensor]
    ) -> list[Tensor | None]:
        if self.first:
            self.is_alone = False
        else:
            self.first.update(zip(weights, map(_bits_of, gradients), strict=True))
            self._stage.show(self)
        return list(gradients)

    def compare(self, weight: nn.Parameter) -> None:
        """Compare the gradient that has arrived at a weight with the gradient of the call."""
        first = self.first.get(weight)
        if first is not None:
            self.first[weight] = None
            if weight.grad is None or not _has_bits(weight.grad, first):
                self.is_alone = False


class StageProducts:
    """The products of all plain modules of a stage."""

    def __init__(
        self,
        layers: Iterable[tuple[str, nn.Module]],
        collector: GradientCollector,
        *,
        is_split: bool,
        beside: Set[nn.Module] = frozenset(),
    ) -> None:
        """`layers` are the stage's modules by name. If backwards are not split, only two kinds of
        modules take part: modules whose weight may have sparse products, and modules in `beside`,
        whose gradients `compute_deferred` may compute."""
        self.is_in_backward = False
        self._is_split = is_split
        self.deferred = DeferredGradients(collector) if is_split or beside else None
        self._products: dict[nn.Module, WeightProducts] = {}
        for name, module in layers:
            for path, each in _uncompiled(module):
                if not has_products(each):
                    continue
                weight = each._parameters["weight"]
                assert isinstance(weight, nn.Parameter)
                sparse = collector.sparse_products(weight) if isinstance(each, nn.Linear) else None
                deferred = self.deferred if is_split or each in beside else None
                if deferred is not None or sparse is not None:
                    full = ".".join(filter(None, (name, path, "weight")))
                    self._products[each] = WeightProducts(full, weight, sparse, self, deferred)
        self._showing: list[WeightProducts] = []
        self._forwards: dict[nn.Module, Callable[..., object]] = {}
        collector.defer(self._weights(), self._arrived)

    def __len__(self) -> int:
        """How many modules may take part."""
        return len(self._products)

    @property
    def unsplit(self) -> list[str]:
        """The weights whose gradients split backwards leave to autograd, since they have gradients
        of more than one call of their module; known once a microbatch has shown it."""
        if not self._is_split:
            return []
        return [each.name for each in self._products.values() if each.is_alone is False]

    def begin_step(self) -> None:
        """See which modules take part in the step that begins. Called while no microbatch is in
        flight, since forward and backward have to see the same."""
        self._forwards = {
            module: product_forward(module, products)
            for module, products in self._products.items()
            if products.deferred is not None
            or (products.sparse is not None and products.sparse.is_wanted)
        }

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """A block in which the modules call their products."""
        with forwards_in_place(self._forwards):
            yield

    @contextmanager
    def backward_of(self, microbatch: int) -> Iterator[None]:
        """The backward of a microbatch; forwards that it recomputes call the products as well."""
        self.is_in_backward = True
        try:
            if self.deferred is None:
                with self.in_place():
                    yield
            else:
                with self.in_place(), self.deferred.backward_of(microbatch):
                    yield
                if not self._is_split:
                    self.deferred.run(microbatch)
        finally:
            self.is_in_backward = False
        while self._showing:  # this backward has shown whether their gradients are alone
            products = self._showing.pop()
            products.first.clear()
            if products.is_alone is None:
                products.is_alone = True

    def show(self, products: WeightProducts) -> None:
        """Have the gradients of these products compared in the present backward."""
        self._showing.append(products)

    def _arrived(self, weight: nn.Parameter) -> bool:
        """Look at a gradient that autograd has accumulated; True if it has to wait."""
        assert self.deferred is not None
        for products in self._showing:
            products.compare(weight)
        return self.deferred.arrive(weight)

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


def _uncompiled(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """A module and all below it with their paths, less those that torch.compile runs."""
    has_compiled_call = getattr(module, "_compiled_call_impl", None) is not None
    if has_compiled_call or is_compiled(module):
        return
    yield path, module
    for name, child in module.named_children():
        yield from _uncompiled(child, f"{path}.{name}" if path else name)


def _has_hooks(weight: nn.Parameter) -> bool:
    """Whether a weight has hooks other than the collector's."""
    hooks = weight._post_accumulate_grad_hooks or ()
    return bool(weight._backward_hooks) or len(hooks) > 1
