"""From autograd's dense gradients to compressed ones, one parameter at a time.

A hook runs as soon as autograd has finished one parameter's gradient: it gathers the kept entries,
adds them to the layer's buffer and frees the dense gradient. So the dense gradients of at most one
layer live at any time.

Most tensors of a transformer are unpruned vectors, for which our own calls would take longer than
the addition: after the first gradient of a step, their `grad` is a view of the layer's buffer, to
which autograd itself adds. On a GPU, where sums of another type than gradients do not allow that,
a layer's vectors wait for each other and are added by one call.

Of linear weights that are mostly pruned a CPU may compute the kept entries alone, and the layer's
other products from them, by a `SparseWeight`, which the layer's own forward gives the factors
(`pipeline/weight_gradients.py`). Dense gradients that split backwards have deferred come by `add`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from axsparse.samo.host.sparse_products import (
    FEWEST_TOKENS,
    can_multiply,
    can_sample,
    may_be_sparse,
    sampled_product,
    sparse_input_gradient,
    sparse_linear,
)
from axsparse.samo.layer_state import LayerState
from axsparse.samo.tensor_state import TensorState

SMALL = 2**16
"""The most entries of a tensor whose gradient may wait for its layer's other small tensors."""


class GradientCollector:
    """Compresses and accumulates the gradients of a stage, and reports when a layer has all.

    `on_ready(layer)` is called once a step for each layer: as soon as all gradients of the last
    microbatch are in for the layer, or by `finish` if autograd did not reach one of its parameters
    there.
    """

    def __init__(
        self,
        layers: Sequence[LayerState],
        on_ready: Callable[[LayerState], None],
        timed: Callable[[bool], AbstractContextManager[object]],
    ) -> None:
        """`timed(is_last)` is entered around each compression; `is_last` says whether the backward
        is the step's last."""
        self._layers = layers
        self._on_ready = on_ready
        self._timed = timed
        self._is_last = False
        self._has_seen_last = False
        self._missing: dict[str, set[str]] = {}
        self._running: dict[str, Tensor | None] = {}
        """The views of this step's gradients to which autograd itself adds, by name of tensor."""
        self._sparse: dict[nn.Parameter, SparseWeight] = {}
        self._sampled: dict[str, Tensor] = {}
        """By name of tensor, the kept entries of a microbatch's gradient that lacks some parts:
        these are added to each other first, as autograd adds them."""
        self._small: dict[str, set[str]] = {}
        """By layer, the names of the tensors whose gradients are added together (`_is_small`)."""
        self._waiting: dict[str, dict[str, tuple[TensorState, Tensor]]] = {}
        """By layer and tensor, the gradients that wait for the other tensors of their layer."""
        self._deferring: dict[nn.Parameter, Callable[[nn.Parameter], bool]] = {}
        """By parameter, a function that says whether a gradient of this parameter is deferred."""
        self._tensors = {
            tensor.parameter: (layer, tensor) for layer in layers for tensor in layer.tensors
        }
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._hook(parameter))
            for parameter in self._tensors
        ]

    def begin(self) -> None:
        """Open a step: the first gradient of each tensor replaces the last step's."""
        self._is_last = self._has_seen_last = False
        self._running.clear()
        self._sampled.clear()
        for layer in self._layers:
            self._missing[layer.name] = {tensor.name for tensor in layer.tensors}
            small = {tensor.name for tensor in layer.tensors if _is_small(layer, tensor)}
            self._small[layer.name] = small
            layer.begin_step()
            for tensor in layer.tensors:
                tensor.parameter.grad = None

    def microbatch(self, *, is_last: bool) -> None:
        """Say whether the gradients that follow are of the step's last microbatch, which completes
        the sums; with split backwards some of an earlier one may follow it. Layers without trained
        parameters, which no hook will report, are reported when the last one is first announced.
        """
        self._is_last = is_last
        if not is_last or self._has_seen_last:
            return
        self._has_seen_last = True
        for layer in self._layers:
            if not layer.tensors:
                self._on_ready(layer)

    def finish(self) -> list[str]:
        """Close the step; returns the names of the tensors that no microbatch gave a gradient,
        whose gradients become zero."""
        unused = []
        for layer in self._layers:
            self._add_waiting(layer)
            for tensor in layer.tensors:
                tensor.parameter.grad = None  # still a view if the last microbatch gave no gradient
                if not tensor.accumulated:
                    layer.sums_of(tensor).zero_()
                    unused.append(tensor.name)
            if self._missing[layer.name]:
                self._missing[layer.name].clear()
                self._report(layer)
        return unused

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, parameter: nn.Parameter) -> Callable[[Tensor], None]:
        layer, tensor = self._tensors[parameter]
        # The user's own hooks, which run before, take the gradient of each microbatch.
        is_hooked = bool(parameter._post_accumulate_grad_hooks)

        def compress(_: Tensor) -> None:
            is_deferred = self._deferring.get(parameter)
            if is_deferred is not None and is_deferred(parameter):
                return
            running = self._running.get(tensor.name)
            gradient = parameter.grad
            # There is no gradient where all of it has been taken out of the backward.
            if gradient is not None:
                if gradient is not running:
                    if running is not None:  # some versions of torch add out of place
                        tensor.accumulated = False
                    self.add(parameter, gradient)
                if self._is_last or is_deferred is not None or is_hooked:
                    # Autograd's own additions would come before the deferred ones.
                    parameter.grad = self._running[tensor.name] = None
                elif gradient is not running:
                    parameter.grad = self._running[tensor.name] = layer.running_gradient(tensor)
            self.complete(parameter)

        return compress

    def add(self, weight: nn.Parameter, gradient: Tensor) -> None:
        """Add a dense gradient."""
        layer, tensor = self._tensors[weight]
        small = self._small[layer.name]
        if tensor.name in small and gradient.layout == torch.strided:
            waiting = self._waiting.setdefault(layer.name, {})
            if tensor.name in waiting:
                self._add_waiting(layer)
            waiting[tensor.name] = tensor, gradient
            if len(waiting) == len(small):
                self._add_waiting(layer)
            return
        with self._timed(self._is_last):
            # An embedding with sparse=True has sparse gradients.
            dense = gradient if gradient.layout == torch.strided else gradient.to_dense()
            if tensor.name in self._sampled:
                values_K = tensor.index.gather(dense.reshape(-1), 0, tensor.kept)
                self._sampled[tensor.name] += values_K
            else:
                layer.accumulate(tensor, dense)

    def _add_waiting(self, layer: LayerState) -> None:
        """Add the small gradients of a layer that wait for each other."""
        waiting = self._waiting.get(layer.name)
        if waiting:
            with self._timed(self._is_last):
                layer.accumulate_small([*waiting.values()])
            waiting.clear()

    # -- gradients that are taken out of the backward --------------------------------------

    def allow_sparse_products(self, names: Collection[str]) -> None:
        """Allow sparse products with the named weights, as far as they may have them: on CPUs."""
        self._sparse.update(
            (tensor.parameter, SparseWeight(self, tensor))
            for layer in self._layers
            for tensor in layer.tensors
            if tensor.full_name in names
            and layer.backend.device.type == "cpu"
            and may_be_sparse(tensor.parameter)
        )

    def sparse_products(self, weight: nn.Parameter) -> SparseWeight | None:
        """The sparse products of a weight; None if it never has any."""
        return self._sparse.get(weight)

    def defer(
        self, weights: Iterable[nn.Parameter], is_deferred: Callable[[nn.Parameter], bool]
    ) -> None:
        """Ask `is_deferred` at each gradient that autograd has accumulated in one of these
        parameters, or that it found to be none; where it is True, `add` and `complete` follow."""
        self._deferring.update((weight, is_deferred) for weight in weights)

    def add_kept(self, tensor: TensorState, values_K: Tensor) -> None:
        """Add the kept entries of a part of a microbatch's gradient, which `complete` accumulates
        with the other parts."""
        before = self._sampled.get(tensor.name)
        self._sampled[tensor.name] = values_K if before is None else before.add_(values_K)

    def complete(self, weight: nn.Parameter) -> None:
        """Note that a weight has all of its gradient of the microbatch, and report its layer after
        the step's last."""
        layer, tensor = self._tensors[weight]
        if tensor.name in self._sampled:
            with self._timed(self._is_last):
                layer.accumulate_kept(tensor, self._sampled.pop(tensor.name))
        if self._is_last:
            missing = self._missing[layer.name]
            missing.discard(tensor.name)
            if not missing:
                self._report(layer)

    def _report(self, layer: LayerState) -> None:
        self._add_waiting(layer)
        self._on_ready(layer)


@dataclass(frozen=True)
class SparseWeight:
    """A linear layer's products with one weight, computed from its kept entries.

    The layer computes y = x Wᵀ + b. `rows` is x `(tokens, inputs)`, and `outer` is the gradient ∂y
    `(tokens, outputs)`.
    """

    collector: GradientCollector
    tensor: TensorState

    @property
    def is_wanted(self) -> bool:
        """Whether the weight is pruned enough for any of the three products."""
        return can_sample(self.tensor) or can_multiply(self.tensor)

    def output(self, rows: Tensor, bias: Tensor | None) -> Tensor | None:
        """y `(tokens, outputs)`, if the weight is pruned enough, and x and b are of its type, and x
        of enough tokens; else None: y and ∂x are then dense products."""
        kind = self.tensor.parameter.dtype
        is_alike = rows.dtype == kind and (bias is None or bias.dtype == kind)
        if not is_alike or len(rows) < FEWEST_TOKENS or not can_multiply(self.tensor):
            return None
        return sparse_linear(rows, self.tensor.parameter, bias)

    def input_gradient(self, outer: Tensor) -> Tensor:
        """∂x = ∂y W `(tokens, inputs)`."""
        return sparse_input_gradient(outer, self.tensor.parameter)

    def accumulate(self, rows: Tensor, outer: Tensor) -> bool:
        """Compute the kept entries of ∂W = ∂yᵀ x, which the collector adds up; False, having done
        nothing, where the weight is not pruned enough, or the tokens are few."""
        if len(rows) < FEWEST_TOKENS or not can_sample(self.tensor):
            return False
        self.collector.add_kept(self.tensor, sampled_product(outer, rows, self.tensor.index))
        return True


def _is_small(layer: LayerState, tensor: TensorState) -> bool:
    """Whether the gradient of a tensor waits for its layer's other small tensors."""
    return (
        layer.backend.launch is not None
        and tensor.kept == tensor.parameter.numel() <= SMALL
        and not layer.is_exact
        and layer.gradient.dtype != tensor.parameter.dtype
    )
