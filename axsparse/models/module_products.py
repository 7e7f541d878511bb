"""Products of linear and convolution modules, with an interface to compute them otherwise.

A plain `nn.Linear`, `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d` knows which product it computes. While
`forwards_in_place` lasts, the `forward` of such a module calls one autograd function with the
module's weight. Its forward and backward run the kernels that autograd would run; the module's
`Products` may compute them otherwise, and take the gradient of the weight out of the backward.
Every other use of the weight, such as a penalty or a call of `F.linear`, is autograd's as ever.

Shapes: x (T, I) inputs of T tokens, W (O, I) weight, b (O,) bias, y (T, O) outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[..., Any]


class Products(Protocol):
    """Takes part in the products of one module.

    To add one, implement these members and hand a module's `product_forward` to
    `forwards_in_place`.
    """

    @property
    def weight(self) -> nn.Parameter:
        """The module's weight W, a leaf of autograd."""

    def output(self, rows: Tensor, bias: Tensor | None) -> Tensor | None:
        """y = x Wᵀ + b of a linear module, without a graph; None to have it computed densely."""

    def input_gradient(self, outer: Tensor) -> Tensor:
        """∂x = ∂y W, of a product whose `output` was not None; `outer` is ∂y."""

    def take(
        self,
        weights: Sequence[nn.Parameter],
        saved: tuple[Tensor, Tensor],
        compute: Callable[..., list[Tensor]],
    ) -> list[Tensor | None]:
        """The gradients that autograd receives, one for each of `weights`: the module's weight, and
        of a convolution also its bias. `compute(*saved)` makes them from the product's input and
        the gradient of its output. None stands for a gradient that has been taken or deferred."""


@contextmanager
def forwards_in_place(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Call these functions in the place of the modules' `forward`, with the same arguments."""
    before = {module: vars(module)["forward"] for module in forwards if "forward" in vars(module)}
    for module, forward in forwards.items():
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            vars(module).pop("forward", None)
        for module, forward in before.items():
            vars(module)["forward"] = forward


def has_products(module: nn.Module) -> bool:
    """Whether a module is a linear layer or a convolution that torch itself computes, with its
    weight as a plain parameter: neither overridden nor compiled, parametrized or frozen."""
    weight = module._parameters.get("weight") if isinstance(module._parameters, dict) else None
    return (
        type(weight) is nn.Parameter
        and weight.requires_grad
        and "forward" not in vars(module)
        and getattr(module, "_compiled_call_impl", None) is None
        and (type(module).forward is nn.Linear.forward or _is_convolution(type(module)))
    )


def product_forward(module: nn.Module, products: Products) -> Forward:
    """The forward of a module that `has_products`, in which `products` take part.

    Inputs whose product or whose derivatives torch computes in another way than by one product of
    matrices (a wrapped tensor, autocast, functorch) have the forward of the class.
    """
    if isinstance(module, nn.Linear):
        return partial(_call_linear, module, products)
    return partial(_call_convolution, module, products)


def _is_convolution(kind: type[nn.Module]) -> bool:
    return any(
        kind.forward is plain.forward
        and getattr(kind, "_conv_forward", None) is plain._conv_forward
        for plain in _CONVOLUTIONS
    )


def _is_usable(module: nn.Module, products: Products, inputs: Tensor) -> bool:
    """Whether autograd records this call with the tensors themselves, not wrappers of them."""
    kind, weight = type(inputs), products.weight
    return (
        module._parameters.get("weight") is weight
        and weight.requires_grad
        and (kind is Tensor or kind is nn.Parameter)
        and inputs.layout is torch.strided
        and not inputs.is_meta
        and not torch.is_autocast_enabled(inputs.device.type)
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _accumulates(ctx: Any, place: int) -> bool | None:
    """Whether the present backward accumulates into a leaf, the function's tensor `place`; None if
    `autograd.grad` was asked for its gradient."""
    try:
        return bool(torch._C._will_engine_execute_node(ctx.next_functions[place][0]))
    except RuntimeError:
        # torch raises this where autograd.grad was asked for the gradient of the leaf.
        return None


def _gradients(
    ctx: Any,
    places: Sequence[int],
    saved: tuple[Tensor, Tensor],
    compute: Callable[..., list[Tensor]],
) -> list[Tensor | None]:
    """The gradients that autograd receives: all of them, unless the products take them, which they
    do in a plain backward only."""
    wanted = (place for place in places if ctx.needs_input_grad[place])
    if all(_accumulates(ctx, place) is False for place in wanted):
        return [None] * len(places)
    if torch.is_grad_enabled() or not _accumulates(ctx, places[0]):
        return list(compute(*saved))
    products: Products = ctx.products
    return products.take(ctx.weights, saved, compute)


# -- linear -----------------------------------------------------------------------------


def _call_linear(module: nn.Linear, products: Products, input: Tensor) -> Tensor:  # noqa: A002
    weight, bias = products.weight, module.bias
    if not (
        _is_usable(module, products, input)
        and input.dim() in (2, 3)
        and input.is_contiguous()
        and weight.is_contiguous()
        and (bias is None or bias.dim() == 1)
    ):
        return type(module).forward(module, input)
    rows = input if input.dim() == 2 else input.view(-1, input.shape[-1])
    if torch.is_grad_enabled():
        apply: Callable[..., Tensor] = _Linear.apply
        output: Tensor | None = apply(rows, weight, bias, products)
    else:
        # The first pass of a part that is recomputed has the bits of the second.
        output = products.output(rows, bias)
    if output is None:
        output = F.linear(rows, weight, bias)
    return output if input.dim() == 2 else output.view(*input.shape[:-1], len(weight))


class _Linear(torch.autograd.Function):
    """y = x Wᵀ + b by the products that autograd computes:

    ∂x = ∂y W,  ∂b = Σ_t ∂y[t],  ∂W = ∂yᵀ x
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: nn.Parameter, bias: Tensor | None, products: Products
    ) -> Tensor:
        output = products.output(rows, bias)
        ctx.save_for_backward(rows, weight)
        ctx.products, ctx.weights, ctx.is_sparse = products, (weight,), output is not None
        ctx.set_materialize_grads(False)
        return F.linear(rows, weight, bias) if output is None else output

    @staticmethod
    def backward(ctx: Any, outer: Tensor | None) -> Any:
        if outer is None:
            return None, None, None, None
        rows, weight = ctx.saved_tensors
        wants_input, _, wants_bias, _ = ctx.needs_input_grad
        of_input = None
        if wants_input and ctx.is_sparse and not torch.is_grad_enabled():
            of_input = ctx.products.input_gradient(outer)
        elif wants_input:
            of_input = _input_gradient(rows, weight, outer)
        of_bias = outer.sum_to_size(outer.shape[1]) if wants_bias else None
        [of_weight] = _gradients(ctx, [1], (rows, outer), _weight_gradient)
        return of_input, of_weight, of_bias, None


def _input_gradient(rows: Tensor, weight: Tensor, outer: Tensor) -> Tensor:
    if rows.stride(0) == 1 and rows.stride(1) == rows.shape[0]:
        return weight.t().mm(outer.t()).t()  # as autograd does for an input in column order
    return outer.mm(weight)


def _weight_gradient(rows: Tensor, outer: Tensor) -> list[Tensor]:
    return [outer.t().mm(rows)]


# -- convolutions -----------------------------------------------------------------------

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _call_convolution(module: Any, products: Products, input: Tensor) -> Tensor:  # noqa: A002
    edges, bias = _edges(module), module.bias
    if (
        edges is None
        or not torch.is_grad_enabled()
        or not _is_usable(module, products, input)
        or input.dim() != products.weight.dim()
        or not (bias is None or type(bias) is nn.Parameter or not bias.requires_grad)
    ):
        output: Tensor = type(module).forward(module, input)
        return output
    if module.padding_mode != "zeros":
        sides = module._reversed_padding_repeated_twice
        input, edges = F.pad(input, sides, mode=module.padding_mode), (0,) * len(edges)  # noqa: A001
    settings = (module.stride, edges, module.dilation, False, (0,) * len(edges), module.groups)
    apply: Callable[..., Tensor] = _Convolution.apply
    return apply(input, products.weight, bias, products, settings)


def _edges(module: Any) -> tuple[int, ...] | None:
    """The padding of each dimension; None where it differs between the two sides."""
    if module.padding == "same":
        sizes = zip(module.dilation, module.kernel_size, strict=True)
        both = [gap * (size - 1) for gap, size in sizes]
        return None if any(total % 2 for total in both) else tuple(total // 2 for total in both)
    return (0,) * len(module.kernel_size) if module.padding == "valid" else module.padding


class _Convolution(torch.autograd.Function):
    """A convolution by the kernels that autograd calls. Kernels of CPUs make the gradients of bias
    and weight together, so the products take both."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        products: Products,
        settings: tuple[Any, ...],
    ) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        has_bias = bias is not None and bias.requires_grad
        ctx.products, ctx.settings = products, settings
        ctx.weights = (weight, bias) if has_bias else (weight,)
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        ctx.set_materialize_grads(False)
        return torch.convolution(inputs, weight, bias, *settings)

    @staticmethod
    def backward(ctx: Any, outer: Tensor | None) -> Any:
        if outer is None:
            return None, None, None, None, None
        inputs, weight = ctx.saved_tensors
        compute = partial(_convolution_backward, weight, ctx.bias_sizes, ctx.settings)
        of_input = None
        if ctx.needs_input_grad[0]:
            [of_input] = compute((True, False, False), inputs, outer)
        places = [1, 2][: len(ctx.weights)]
        later = partial(compute, (False, True, len(places) == 2))
        of_weight, *of_bias = _gradients(ctx, places, (inputs, outer), later)
        return of_input, of_weight, of_bias[0] if of_bias else None, None, None


def _convolution_backward(
    weight: Tensor,
    bias_sizes: list[int] | None,
    settings: tuple[Any, ...],
    wanted: tuple[bool, bool, bool],
    inputs: Tensor,
    outer: Tensor,
) -> list[Tensor]:
    """The gradients of input, weight and bias that `wanted` asks for."""
    gradients = torch.ops.aten.convolution_backward(
        outer, inputs, weight, bias_sizes, *settings, wanted
    )
    return [each for each, is_wanted in zip(gradients, wanted, strict=True) if is_wanted]
