"""Stand-ins for weights, which take the gradient of the weight out of the backward.

While a stage runs, a `StandIn` is in the place of each weight whose gradient can wait. It shares
the weight's memory. A call of a linear or convolution function with it computes the same output
and the same gradients of input and bias as ever, by the same calls of kernels as autograd's, and
leaves input and output gradient for later. A weight that is mostly pruned may have sparse products,
which take all three over. Every other function takes a stand-in as an ordinary tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from axsparse.pipeline.late_weights import LateWeights, SparseProducts
from axsparse.pipeline.original_weight import OriginalWeight

Sizes = tuple[int, ...]


class StandIn(nn.Parameter):
    """Stands in for one weight of a module."""

    original: OriginalWeight

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear:
                return _linear(*args, **kwargs)
            if func in _CONVOLUTIONS and torch.is_grad_enabled():
                return _convolution(func, *args, **kwargs)
            return _otherwise(func, args, kwargs)


def stand_in(
    name: str, weight: nn.Parameter, late: LateWeights, sparse: SparseProducts | None = None
) -> StandIn:
    """A stand-in whose weight's gradients go to `late`; `name` is the weight's, for errors.

    With `sparse` products, hooks that the weight gets later are for whole gradients, which it then
    has.
    """
    made = torch.Tensor._make_subclass(StandIn, weight.detach(), True)
    assert isinstance(made, StandIn)
    vars(made).update(vars(weight))
    hooks = len(weight._post_accumulate_grad_hooks or ())
    made.original = OriginalWeight(name, weight, weight.detach(), late, sparse, hooks=hooks)
    register: Callable[..., object] = made.register_post_accumulate_grad_hook
    register(_pass_on)
    return made


def _otherwise(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Call a function that takes stand-ins as ordinary tensors, and note it for sparse products."""
    result = func(*args, **kwargs)
    if isinstance(result, Tensor) and result.requires_grad:
        for given in (*args, *kwargs.values()):
            for made in given if isinstance(given, list | tuple) else (given,):
                if isinstance(made, StandIn) and made.original.sparse is not None:
                    made.original.is_used_otherwise = True
    return result


def _pass_on(made: Tensor) -> None:
    """Leave a gradient that autograd made of a stand-in for its turn."""
    assert isinstance(made, StandIn)
    with torch._C.DisableTorchFunctionSubclass():
        gradient, made.grad = made.grad, None
    if gradient is None:
        return  # All uses in this graph are split.
    made.original.is_used_otherwise = True
    made.original.leave((gradient,), _itself)


def _itself(gradient: Tensor) -> list[Tensor]:
    return [gradient]


# -- linear -----------------------------------------------------------------------------


def _linear(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    if not isinstance(weight, StandIn) or not _is_plain_product(input, weight, bias):
        whole: Tensor = _otherwise(F.linear, (input, weight, bias), {})
        return whole
    original = weight.original
    if not (weight.requires_grad and original.weight.requires_grad):
        return F.linear(input, original.alias, bias)  # frozen since, for good or for this call
    shape = input.shape
    rows = input if len(shape) == 2 else input.view(-1, shape[-1])
    if torch.is_grad_enabled():
        original.use()
        product = _product(rows, weight, bias)
    else:
        # The first pass of a part that is recomputed has the bits of the second.
        product = original.output(rows, bias)
    return product if len(shape) == 2 else product.view(*shape[:-1], len(original.alias))


def _product(rows: Tensor, weight: StandIn, bias: Tensor | None) -> Tensor:
    """y = x Wᵀ + b, whose backward leaves the gradient of W.

    Where autograd makes a gradient of x or b, it knows nothing of W, and what it hands to its own
    backward is noted: that is quicker than a function of ours. What is noted is kept until then,
    which is more than a part that is recomputed may keep; and the note cannot tell the stage's
    backward from one within a recomputation, for the gradient of an activation alone.
    """
    original = weight.original
    has_node = rows.requires_grad or (bias is not None and bias.requires_grad)
    is_noted = has_node and _saves_as_usual() and not original.late.is_in_backward
    if is_noted and not original.takes(rows, bias):
        product = F.linear(rows, original.alias, bias)
        node = product.grad_fn
        assert node is not None, "an input requires a gradient"
        node.register_prehook(_note_of(original, rows.detach()))
        return product
    apply: Callable[..., Tensor] = _Linear.apply
    return apply(rows, original, bias, weight)


def _saves_as_usual() -> bool:
    """Whether autograd keeps what backwards need as it is: nothing there is recomputed or moved."""
    return _saved_tensors_hooks is not None and _saved_tensors_hooks(False) is None


_saved_tensors_hooks: Callable[[bool], object] | None = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", None
)
"""Gives the innermost hooks on what autograd saves. Not every version of torch has it."""


def _note_of(original: OriginalWeight, rows: Tensor) -> Callable[[Sequence[Tensor | None]], None]:
    """A hook of a product's backward that leaves the gradient of its weight for later."""
    held, version = [rows], rows._version

    def leave(gradients: Sequence[Tensor | None]) -> None:
        outer = gradients[0]
        if outer is None:
            return
        if not held:
            raise RuntimeError(
                f"the backward of a linear call with {original.name} ran a second time"
            )
        if held[0]._version != version:
            raise RuntimeError(
                f"the input of a linear call with {original.name} was modified by an inplace "
                "operation before its backward, which needs it"
            )
        original.leave((held[0], outer), _weight_gradient)
        if original.late.is_in_backward:
            held.clear()  # The graph, and this hook with it, lives until the whole backward ends.

    return leave


def _wants_weights(ctx: Any) -> bool:
    """Whether the present backward makes gradients of weights, and not of some activations alone;
    the weight's stand-in is the last input of the function."""
    wants: bool = torch._C._will_engine_execute_node(ctx.next_functions[-1][0])
    return wants


def _is_plain_product(inputs: Tensor, weight: StandIn, bias: Tensor | None) -> bool:
    """Whether torch computes this by one product of matrices, whose backward is known."""
    return (
        _is_plain(inputs)
        and inputs.dim() in (2, 3)
        and inputs.is_contiguous()
        and weight.original.alias.is_contiguous()
        and (bias is None or (bias.dim() == 1 and not isinstance(bias, StandIn)))
    )


def _is_plain(inputs: Tensor) -> bool:
    """Whether autograd records calls with this tensor itself, not something around it."""
    kind = type(inputs)
    return (
        (kind is Tensor or kind is nn.Parameter)
        and inputs.layout is torch.strided
        and not torch.is_autocast_enabled(inputs.device.type)
        and torch._C._functorch.peek_interpreter_stack() is None
    )


class _Linear(torch.autograd.Function):
    """With x (T, I), W (O, I), b (O,) and y = x Wᵀ + b, the products that autograd computes:

    ∂x = ∂y W,  ∂b = Σ_t ∂y[t],  and later ∂W = ∂yᵀ x
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, original: OriginalWeight, bias: Tensor | None, _: StandIn
    ) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.original, ctx.is_sparse = original, original.takes(rows, bias)
        ctx.set_materialize_grads(False)
        return original.output(rows, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor | None) -> Any:
        if outer is None:
            return None, None, None, None
        (rows,) = ctx.saved_tensors
        original: OriginalWeight = ctx.original
        wants_input, _, wants_bias, _ = ctx.needs_input_grad
        of_input = None
        if wants_input and ctx.is_sparse:
            assert original.sparse is not None
            of_input = original.sparse.input_gradient(outer)
        elif wants_input:
            of_input = _input_gradient(rows, original.alias, outer)
        of_bias = outer.sum_to_size(outer.shape[1]) if wants_bias else None
        if _wants_weights(ctx):
            original.leave((rows, outer), _weight_gradient)
        return of_input, None, of_bias, None


def _input_gradient(rows: Tensor, weight: Tensor, outer: Tensor) -> Tensor:
    if rows.stride(0) == 1 and rows.stride(1) == rows.shape[0]:
        return weight.t().mm(outer.t()).t()  # as autograd does for an input in column order
    return outer.mm(weight)


def _weight_gradient(rows: Tensor, outer: Tensor) -> list[Tensor]:
    return [outer.t().mm(rows)]


# -- convolutions -----------------------------------------------------------------------

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


# Reason: these are the arguments of torch's convolutions.
def _convolution(
    func: Any,
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    steps, gaps = _each(stride, weight), _each(dilation, weight)
    edges = _edges(padding, weight, gaps)
    if (
        edges is None
        or not isinstance(weight, StandIn)
        or not _is_plain(input)
        or input.dim() != weight.dim()
        # Kernels make the gradient of a bias together with that of the weight.
        or (bias is not None and bias.requires_grad and not isinstance(bias, StandIn))
    ):
        settings = (stride, padding, dilation, groups)
        whole: Tensor = _otherwise(func, (input, weight, bias, *settings), {})
        return whole
    apply: Callable[..., Tensor] = _Convolution.apply
    originals = weight.original, bias.original if isinstance(bias, StandIn) else bias
    return apply(input, *originals, (steps, edges, gaps, groups), weight)


def _each(value: int | Sequence[int], weight: Tensor) -> Sizes:
    """A setting for each dimension of a convolution."""
    sizes = (value,) if isinstance(value, int) else tuple(value)
    return sizes * (weight.dim() - 2) if len(sizes) == 1 else sizes


def _edges(padding: int | Sequence[int] | str, weight: Tensor, gaps: Sizes) -> Sizes | None:
    """The padding of each dimension; None where it differs between the two sides."""
    if padding == "valid":
        return (0,) * len(gaps)
    if isinstance(padding, str):
        both = [gap * (size - 1) for gap, size in zip(gaps, weight.shape[2:], strict=True)]
        return None if any(total % 2 for total in both) else tuple(total // 2 for total in both)
    return _each(padding, weight)


class _Convolution(torch.autograd.Function):
    """A convolution whose weight and bias get their gradients later, by the same kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        original: OriginalWeight,
        bias: OriginalWeight | Tensor | None,
        settings: tuple[Sizes, Sizes, Sizes, int],
        _: StandIn,
    ) -> Tensor:
        steps, edges, gaps, groups = settings
        added = bias.alias if isinstance(bias, OriginalWeight) else bias
        ctx.save_for_backward(inputs)
        ctx.original, ctx.biases = original, [bias] if isinstance(bias, OriginalWeight) else []
        ctx.sizes = None if added is None else list(added.shape)
        ctx.fixed = (steps, edges, gaps, False, (0,) * len(steps), groups)
        ctx.set_materialize_grads(False)
        return torch.convolution(inputs, original.alias, added, *ctx.fixed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> Any:
        if gradient is None:
            return None, None, None, None, None
        [inputs] = ctx.saved_tensors
        original: OriginalWeight = ctx.original
        compute = partial(_convolution_backward, original.alias, ctx.sizes, ctx.fixed)
        of_input = None
        if ctx.needs_input_grad[0]:
            (of_input,) = compute((True, False, False), inputs, gradient)
        later = partial(compute, (False, True, bool(ctx.biases)))
        if _wants_weights(ctx):
            original.leave((inputs, gradient), later, ctx.biases)
        return of_input, None, None, None, None


def _convolution_backward(
    weight: Tensor,
    bias_sizes: list[int] | None,
    fixed: tuple[Any, ...],
    wanted: tuple[bool, bool, bool],
    inputs: Tensor,
    gradient: Tensor,
) -> list[Tensor]:
    """The wanted ones of the gradients of input, weight and bias."""
    found = torch.ops.aten.convolution_backward(
        gradient, inputs, weight, bias_sizes, *fixed, wanted
    )
    return [each for each, is_wanted in zip(found, wanted, strict=True) if is_wanted]
