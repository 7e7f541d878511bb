"""Calls one layer's module, so that its result does not depend on the layout.

A forward may write into its inputs, return strided tensors, one tensor twice or one of its
buffers, change buffers, or draw random numbers. Each of these would differ between layouts, or
between a forward and its recomputation, so that copies and seeds make it safe. The first calls of
a layer show what it writes to; every call finds the global generators seeded, since a layer may
begin to draw at any time.

A `RecordedRun` of a layer can be repeated as plain torch runs the user's module (`run_plainly`),
to which `training/layer_check.py` compares it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from axsparse.models.layer import as_arguments, as_tuple, takes_tuple
from axsparse.models.module_buffers import (
    BufferCopies,
    BufferSlot,
    replaced,
    same_attributes,
    slots,
    switch_mode,
    types_of_statistics,
)
from axsparse.runtime.canonical_form import canonical, canonical_gradient
from axsparse.runtime.errors import ConfigError, note_errors
from axsparse.runtime.seeds import preserved_rng, seed_all
from axsparse.samo.layer_state import LayerState, written_weight

Tensors = tuple[Tensor, ...]
DrawKey = tuple[int | str, ...]
"""The key from which the random numbers of a call follow."""


@dataclass
class Run:
    """One forward and backward of a layer: its outputs, and the gradients that it made."""

    outputs: Tensors = ()
    input_gradients: list[Tensor | None] = field(default_factory=list)
    """One for each input; None for an input that got none."""
    weight_gradients: dict[str, Tensor | None] = field(default_factory=dict)
    """By the name of the parameter within the layer; None for one that got none."""
    buffers_after: dict[str, Tensor] = field(default_factory=dict)
    """The buffers as the forward left them, by name."""


@dataclass
class RecordedRun(Run):
    """A run of a layer in the layout, and all that it took: `run_plainly` repeats it.

    Inputs and outputs share memory with the run, in which nobody writes to them: the layers copy
    inputs while it is not known whether they write, and the loss gets copies. The gradients of
    weights are in the layer's state, not here.
    """

    inputs: Tensors = ()
    requires_grad: tuple[bool, ...] = ()
    key: DrawKey = ()
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """The buffers as the forward found them, by name."""
    output_gradients: list[Tensor | None] = field(default_factory=list)

    def begin(self, inputs: Tensors, key: DrawKey, buffers: Sequence[BufferSlot]) -> Tensors:
        """Note inputs and buffers; returns views of the inputs, which show their gradients."""
        self.key = key
        self.inputs = tuple(tensor.detach() for tensor in inputs)
        self.requires_grad = tuple(tensor.requires_grad for tensor in inputs)
        self.buffers = _contents(buffers)
        views = tuple(tensor.view_as(tensor) for tensor in inputs)
        return _watched(views, self.input_gradients)

    def leaves(self) -> list[Tensor]:
        """Copies of the inputs, with gradients where the run had them."""
        pairs = zip(self.inputs, self.requires_grad, strict=True)
        return [tensor.clone().requires_grad_(needs) for tensor, needs in pairs]

    def end(self, outputs: Tensors, buffers: Sequence[BufferSlot]) -> Tensors:
        """Note outputs and buffers; returns copies of the outputs, which show their gradients."""
        self.outputs = tuple(tensor.detach() for tensor in outputs)
        self.buffers_after = _contents(buffers)
        return _watched(tuple(tensor.clone() for tensor in outputs), self.output_gradients)


class LayerRunner:
    """One layer of a stage, as it runs in training and in evaluation."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        is_recomputed: bool,
        is_compiled: bool = False,
        state: LayerState | None = None,
    ) -> None:
        """`is_recomputed` says that the backward computes the activations once more instead of
        keeping them, and `is_compiled` that torch.compile fuses the layer's operations. `state` has
        the weights that are sparse at rest; None if there are none."""
        self.name = name
        self._state = state
        self._module = module
        self._is_recomputed = is_recomputed
        self._modes: list[tuple[nn.Module, bool]] | None = None
        """All modules, and whether they train otherwise, within an evaluation; else None."""
        self._slots = slots(module)
        self._copies = BufferCopies(self._slots, "pipeline.checkpoint_activations: 0")
        self._writes: dict[bool, bool] = {}
        """Whether a forward writes into its inputs, by training mode, once it is known."""
        self._takes_tuple: dict[int, bool] = {}
        """`takes_tuple` by the number of inputs: signatures are slow to read."""
        self.parameters = list(module.parameters())
        self._widened = _half_parameters_of_norms(module)
        if is_compiled:
            _allow_graphs()
        self._run = torch.compile(self._call, dynamic=False) if is_compiled else self._call
        self.record: RecordedRun | None = None
        """Takes down the next training forward and its backward; None takes down nothing."""

    def train(self, inputs: Tensors, key: DrawKey) -> Tensors:
        """The outputs of a training forward, whose random numbers follow from `key`.

        Outputs and their gradients have the canonical form, as if they came from another stage.
        Here and in `evaluate`, the caller preserves the global generators.
        """
        self._expand()
        self.end_evaluation()
        record = self.record
        if record is not None:
            inputs = record.begin(inputs, key, self._slots)
        outputs = self._once_or_twice(inputs, key)
        for output in outputs:
            if output.requires_grad and not output.is_leaf:
                output.register_hook(canonical_gradient)
                # Autograd has finished all later layers before this one's first operation.
                output.register_hook(self._expand)
        return outputs if record is None else record.end(outputs, self._slots)

    def evaluate(self, inputs: Tensors, key: DrawKey) -> Tensors:
        """The outputs of an evaluation; the caller drops what it changes in saved buffers. The
        module stays in evaluation until `end_evaluation`."""
        self._expand()
        if self._modes is None:
            self._modes = [(each, each.training) for each in self._module.modules()]
            self._set_mode(training=False)
        seed_all(*key, "evaluate")
        return self._own(inputs)

    @torch.no_grad()
    def run_again(self, inputs: Tensors) -> Tensors:
        """The outputs of one more call, in the mode of the one before, which leaves the buffers and
        attributes of the module as they are."""
        self._expand()
        buffers = [(slot, slot.tensor.clone()) for slot in self._slots]
        with same_attributes([self._module]), replaced(buffers):
            return self._own(inputs)

    def _expand(self, _: Tensor | None = None) -> None:
        """Make the layer's weights dense: before its forward, and before its backward, which a
        recomputation is part of."""
        if self._state is not None:
            self._state.expand()

    def end_evaluation(self) -> None:
        """Give the modules the modes that the first evaluation since has found, which may be the
        user's: a frozen normalisation stays in evaluation."""
        if self._modes is not None:
            self._set_mode(training=True)
            for each, trains in self._modes:
                each.training = trains
            self._modes = None

    def _set_mode(self, *, training: bool) -> None:
        """Set the modes of all modules, if any of them trains otherwise."""
        if any(trains for _, trains in self._modes or ()):
            switch_mode(self.name, self._module, training=training)

    # -- recomputation ------------------------------------------------------------------

    def _once_or_twice(self, inputs: Tensors, key: DrawKey) -> Tensors:
        """One forward; its backward computes it a second time if the layer is recomputed."""
        if not self._is_recomputed:
            return self._seeded(inputs, key)
        before = self._copies.take()
        passes = 0

        def forward(*tensors: Tensor) -> Tensors:
            nonlocal passes
            passes += 1
            if passes == 1:
                outputs = self._seeded(tensors, key)
                self._copies.learn(before, is_repeated=True)
                return outputs
            # The second pass starts from the same buffers, and its changes to them are dropped.
            with replaced(before), preserved_rng(is_seeded=True):
                return self._seeded(tensors, key)

        # Each pass seeds the generators from the key, so both draw the same random numbers.
        outputs: Tensors = checkpoint(
            forward, *inputs, use_reentrant=False, preserve_rng_state=False
        )
        return outputs

    # -- one call -----------------------------------------------------------------------

    def _seeded(self, inputs: Tensors, key: DrawKey) -> Tensors:
        seed_all(*key, "forward")
        return self._own(inputs)

    def _own(self, inputs: Tensors) -> Tensors:
        """One call that leaves its inputs as they are, which get copied for a layer that writes:
        others get views, whose hooks are of this call alone, and see gradients first."""
        writes = self._writes.get(self._module.training)
        inputs = tuple(
            tensor.view_as(tensor) if writes is False else tensor.clone() for tensor in inputs
        )
        watched = inputs if writes is not None else (*self.parameters, *inputs)
        versions = [tensor._version for tensor in watched]
        count = len(inputs)
        if count not in self._takes_tuple:
            self._takes_tuple[count] = takes_tuple(self._module, count)
        arguments = (tuple(inputs),) if self._takes_tuple[count] else inputs
        try:
            with note_errors(f"layer {self.name}"):
                outputs = as_tuple(self.name, self._run(arguments))
        except RuntimeError as reason:
            if writes is False and "view of a leaf Variable" in str(reason):
                raise self._now_writing() from reason
            raise
        changed = [old != each._version for old, each in zip(versions, watched, strict=True)]
        if writes is False and any(changed):
            raise self._now_writing()
        if writes is None:
            self._reject_written_weights(changed)
            self._writes[self._module.training] = any(changed[len(self.parameters) :])
        return self._apart(outputs)

    def _now_writing(self) -> ConfigError:
        """The error of a forward that writes to its inputs in later calls alone."""
        return ConfigError(
            f"layer {self.name}: its forward has begun to write to its input, which it did not in "
            "its first call; let it write to a copy (x = x.clone())"
        )

    def _reject_written_weights(self, changed: Sequence[bool]) -> None:
        """ConfigError for the first parameter that a forward has changed in place."""
        for (name, _), is_changed in zip(self._module.named_parameters(), changed, strict=False):
            if is_changed:
                raise written_weight(self.name, name)

    def _call(self, inputs: Sequence[Any]) -> object:
        """Call the module, with the parameters of normalisations as wide as their statistics."""
        if not self._widened:
            return self._module(*inputs)
        wide = {name: parameter.to(dtype) for name, parameter, dtype in self._widened}
        return functional_call(self._module, wide, tuple(inputs), tie_weights=False)

    def _apart(self, outputs: Tensors) -> Tensors:
        """The outputs in canonical form, each a separate tensor, copied where a later call or layer
        writes: uses of one tensor would add gradients in an order that depends on the stages."""
        buffers = {slot.tensor.untyped_storage().data_ptr() for slot in self._slots}
        apart: list[Tensor] = []
        for output in map(canonical, outputs):
            is_lent = self._state is not None and self._state.lends(output)
            if is_lent or (buffers and output.untyped_storage().data_ptr() in buffers):
                output = output.clone()
            elif any(output is other for other in apart):
                output = output.view_as(output)
            apart.append(output)
        return tuple(apart)


def run_plainly(name: str, module: nn.Module, record: RecordedRun) -> Run:
    """Repeat a recorded run as plain torch runs a module: with its own hooks, modes and buffers,
    without recomputation, and with autograd's own gradients of weights.

    The caller has given the module the weights and the buffers. Gradients that the parameters had
    are left as they were.
    """
    inputs = record.leaves()
    parameters = dict(module.named_parameters())
    before = {name: parameter.grad for name, parameter in parameters.items()}
    for parameter in parameters.values():
        parameter.grad = None
    try:
        outputs = forward_plainly(name, module, record, inputs)
        buffers = _contents(slots(module))
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, record.output_gradients, strict=False)
            if output.requires_grad and gradient is not None
        ]
        if pairs:
            backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
        gradients = {name: parameter.grad for name, parameter in parameters.items()}
    finally:
        for name, parameter in parameters.items():
            parameter.grad = before[name]
    given = [each.grad for each in inputs]
    return Run(tuple(output.detach() for output in outputs), given, gradients, buffers)


def forward_plainly(
    name: str, module: nn.Module, record: RecordedRun, inputs: Sequence[Tensor]
) -> Tensors:
    """The outputs of a module for the inputs of a record, with the random numbers of its run."""
    with preserved_rng(is_seeded=True):
        seed_all(*record.key, "forward")
        # Copies, since a module may write into its inputs.
        copies = [tensor.clone() for tensor in inputs]
        return as_tuple(name, module(*as_arguments(module, copies)))


class _Start(torch.autograd.Function):
    """A scalar whose backward passes each of `roots` its gradient, as `torch.autograd.backward`
    does, which imports sympy for that (0.3 s, 40 MB)."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *roots: Tensor) -> Tensor:
        ctx.gradients = gradients
        return roots[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.gradients


def backward(roots: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    """Run autograd from some tensors with their gradients, in this thread: hooks of gradients need
    its stream and device."""
    with torch.autograd.set_multithreading_enabled(False):
        start: Callable[..., Tensor] = _Start.apply
        start(gradients, *roots).backward()


def _contents(buffers: Sequence[BufferSlot]) -> dict[str, Tensor]:
    return {slot.name: slot.tensor.detach().clone() for slot in buffers}


def _watched(tensors: Tensors, gradients: list[Tensor | None]) -> Tensors:
    """Tensors within autograd's graph, whose gradients a list takes down."""
    gradients.extend([None] * len(tensors))

    def note(place: int, gradient: Tensor) -> None:
        gradients[place] = None if gradient is None else gradient.detach().clone()

    for place, tensor in enumerate(tensors):
        if tensor.requires_grad:
            tensor.register_hook(partial(note, place))
    return tensors


def _allow_graphs() -> None:
    """Let torch.compile make four more graphs of one function, which all layers run: from the ninth
    on it would only warn and fuse nothing."""
    from torch._dynamo import config

    # Torch before 2.6 has the older name.
    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    for known in (name, f"accumulated_{name}"):
        setattr(config, known, getattr(config, known) + 4)


def _half_parameters_of_norms(module: nn.Module) -> list[tuple[str, nn.Parameter, torch.dtype]]:
    """The parameters of normalisations in another type than the statistics there (fp32, since half
    precision loses small changes), each with its name and that type."""
    return [
        (name, parameter, dtype)
        for name, dtype in types_of_statistics(module).items()
        if (parameter := module.get_parameter(name)).dtype != dtype
    ]
