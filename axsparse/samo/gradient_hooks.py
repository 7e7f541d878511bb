"""From autograd's dense gradients to compressed ones, one parameter at a time.

A hook runs as soon as autograd has finished one parameter's gradient: it gathers the kept entries,
adds them to the layer's buffer and frees the dense gradient. So the dense gradients of at most one
layer live at any time.

Tensors that are not pruned take a shortcut: after the first gradient of a step, the parameter's
`grad` is a view of the layer's buffer, and autograd itself adds to it. Most tensors of a
transformer are unpruned vectors, for which our own calls would take longer than the addition.

Of linear weights that are mostly pruned a CPU may compute the kept entries alone, and the layer's
other products from them. A `SparseWeight` does so for one weight; `pipeline/weight_stand_in.py`
gives it the factors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from axsparse.samo.growth_candidates import Candidates, strongest
from axsparse.samo.host.sampled_product import (
    FEWEST_TOKENS,
    can_sample,
    may_be_sparse,
    sampled_product,
)
from axsparse.samo.host.sparse_linear import can_multiply, sparse_input_gradient, sparse_linear
from axsparse.samo.layer_state import LayerState
from axsparse.samo.tensor_state import TensorState


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
        self._wanted: dict[str, int] = {}
        self._candidates: dict[str, Candidates] = {}
        self._running: dict[str, Tensor | None] = {}
        """The views of this step's gradients to which autograd itself adds, by name of tensor."""
        self._handles = [
            tensor.parameter.register_post_accumulate_grad_hook(self._hook(layer, tensor))
            for layer in layers
            for tensor in layer.tensors
        ]

    def begin(self) -> None:
        """Open a step: the first gradient of each tensor replaces what is there."""
        self._is_last = self._has_seen_last = False
        self._candidates.clear()
        self._running.clear()
        for layer in self._layers:
            self._missing[layer.name] = {tensor.name for tensor in layer.tensors}
            for tensor in layer.tensors:
                tensor.accumulated, tensor.partials = False, None
                tensor.parameter.grad = None

    def microbatch(self, *, is_last: bool) -> None:
        """Say whether the gradients that follow are of the step's last microbatch, which completes
        the sums.

        With split backwards, gradients of an earlier microbatch may follow some of the last one.
        Layers without trained parameters, which no hook will report, are reported at the first
        word of the last one.
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
            for tensor in layer.tensors:
                tensor.parameter.grad = None  # still a view if the last microbatch gave no gradient
                if not tensor.accumulated:
                    layer.gradient_of(tensor).zero_()
                    unused.append(tensor.name)
            if self._missing[layer.name]:
                self._missing[layer.name].clear()
                self._on_ready(layer)
        return unused

    def harvest(self, wanted: Mapping[str, int]) -> None:
        """From the next step on, collect growth candidates: `wanted` has their number by tensor.

        Every step begins anew, so the candidates come from one step's microbatches: each
        microbatch adds its gradient to the list, and the strongest sums stay.
        """
        self._wanted = dict(wanted)

    def harvested(self) -> dict[str, Candidates]:
        """Stop collecting, and return the candidates of the last step by name of tensor; tensors
        without a gradient have none."""
        found, self._candidates, self._wanted = self._candidates, {}, {}
        return found

    @property
    def candidate_bytes(self) -> int:
        """Bytes of the candidates that are held."""
        return sum(candidates.nbytes for candidates in self._candidates.values())

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, layer: LayerState, tensor: TensorState) -> Callable[[Tensor], None]:
        def compress(parameter: Tensor) -> None:
            running = self._running.get(tensor.name)
            gradient = parameter.grad
            assert gradient is not None, "autograd calls this once the gradient is there"
            if gradient is not running:
                if running is not None:
                    # A torch that adds out of place has made the sum in memory of its own.
                    tensor.accumulated = False
                with self._timed(self._is_last):
                    # An embedding with sparse=True has sparse gradients.
                    is_dense = gradient.layout == torch.strided
                    dense = gradient if is_dense else gradient.to_dense()
                    if tensor.name in self._wanted:
                        self._pick(tensor, dense)
                    layer.accumulate(tensor, dense, is_last=self._is_last)
            if self._is_last:
                parameter.grad = self._running[tensor.name] = None
            elif gradient is not running:
                parameter.grad = self._running[tensor.name] = layer.running_gradient(tensor)
            self._complete(layer, tensor)

        return compress

    def sparse_weights(self, names: Collection[str]) -> dict[nn.Parameter, SparseWeight]:
        """Those of the named weights that may have sparse products: on CPUs, where nobody else has
        a hook."""
        return {
            tensor.parameter: SparseWeight(self, layer, tensor)
            for layer in self._layers
            for tensor in layer.tensors
            if tensor.name in names
            and layer.backend.device.type == "cpu"
            and may_be_sparse(tensor.parameter)
            and not tensor.parameter._backward_hooks
            and len(tensor.parameter._post_accumulate_grad_hooks or ()) == 1
        }

    def sample(self, layer: LayerState, tensor: TensorState, rows: Tensor, outer: Tensor) -> bool:
        """Accumulate the kept entries of a gradient `outerᵀ rows`, where growth candidates do not
        need the others; returns whether it did."""
        if tensor.name in self._wanted or len(rows) < FEWEST_TOKENS or not can_sample(tensor):
            return False
        values_K = sampled_product(outer, rows, tensor.index)
        with self._timed(self._is_last):
            layer.accumulate_kept(tensor, values_K)
        self._complete(layer, tensor)
        return True

    def _complete(self, layer: LayerState, tensor: TensorState) -> None:
        """Note that a microbatch's gradient of a tensor is in, and report its layer after the last
        one of the step."""
        if self._is_last:
            missing = self._missing[layer.name]
            missing.discard(tensor.name)
            if not missing:
                self._on_ready(layer)

    def _pick(self, tensor: TensorState, dense: Tensor) -> None:
        """Add a dense gradient to the tensor's candidates; needs 5 bytes of memory an entry."""
        before = self._candidates.get(tensor.name)
        self._candidates[tensor.name] = strongest(
            dense.reshape(-1).to(torch.float32, copy=True),
            () if before is None else (before,),
            tensor.index,
            self._wanted[tensor.name],
        )


@dataclass(frozen=True)
class SparseWeight:
    """A linear layer's products with one weight, computed from its kept entries.

    Called what x, y = x Wᵀ + b and their gradients are in the layer, `rows` is x `(tokens, inputs)`
    and `outer` is ∂y `(tokens, outputs)`.
    """

    collector: GradientCollector
    layer: LayerState
    tensor: TensorState

    @property
    def is_wanted(self) -> bool:
        """Whether the weight is pruned enough for any of the three products."""
        return can_sample(self.tensor) or can_multiply(self.tensor)

    @property
    def multiplies(self) -> bool:
        """Whether it is pruned enough for y and ∂x."""
        return can_multiply(self.tensor)

    def takes(self, rows: Tensor, bias: Tensor | None) -> bool:
        """Whether these are of the weight's type, and enough of them."""
        kind = self.tensor.parameter.dtype
        is_alike = rows.dtype == kind and (bias is None or bias.dtype == kind)
        return is_alike and len(rows) >= FEWEST_TOKENS

    def output(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """y `(tokens, outputs)`."""
        return sparse_linear(rows, self.tensor.parameter, bias)

    def input_gradient(self, outer: Tensor) -> Tensor:
        """∂x = ∂y W `(tokens, inputs)`."""
        return sparse_input_gradient(outer, self.tensor.parameter)

    def accumulate(self, rows: Tensor, outer: Tensor) -> bool:
        """Accumulate the kept entries of ∂W = ∂yᵀ x; False, having done nothing, if all of its
        entries are wanted."""
        return self.collector.sample(self.layer, self.tensor, rows, outer)
