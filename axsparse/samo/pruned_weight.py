"""Weights of a finished model that rest as their kept entries, and are multiplied from them.

A `PrunedWeight` stands in the place of a parameter. Products with few tokens are computed from its
kept entries; any other operation gets the dense weight, expanded for the moment, so that every
module computes what it would with the dense weight in bf16.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from axsparse.runtime.errors import ConfigError, check_kind, check_kinds
from axsparse.samo.host.kept_matrix import KeptMatrix, has_loops

FEWEST_ZEROS = 0.4
"""The share of zeros from which a weight takes less time and memory as its kept entries."""


class PrunedWeight(Tensor):
    """A weight `(outputs, inputs)`, or one such weight for each expert, `(experts, outputs,
    inputs)`, by its kept entries in bf16; or, if `is_transposed`, with inputs before outputs.

    It cannot be trained or changed, and has no memory of its own that could be saved: ConfigError.
    """

    matrices: Sequence[KeptMatrix]
    is_transposed: bool
    matrix: KeptMatrix | None
    """The one matrix of a weight of two dimensions."""
    computed: torch.dtype
    """The type of inputs and outputs. (Asking a tensor for its `dtype` takes as long as a small
    product, where the tensor is of a class of one's own.)"""

    # Reason: torch makes tensors in __new__, and gives __init__ the same arguments.
    def __new__(
        cls, matrices: Sequence[KeptMatrix], shape: Sequence[int], dtype: torch.dtype, turned: bool
    ) -> PrunedWeight:
        """`matrices` are `(outputs, inputs)`; `dtype` is the type of inputs and outputs."""
        make: Any = Tensor._make_wrapper_subclass
        made: PrunedWeight = make(cls, tuple(shape), dtype=dtype, device="cpu")
        made.matrices, made.is_transposed, made.computed = matrices, turned, dtype
        made.matrix = matrices[0] if len(shape) == 2 else None
        return made

    @classmethod
    def of(cls, dense: Tensor, *, is_transposed: bool = False) -> PrunedWeight:
        """The weight of a dense tensor of two or three dimensions, on the CPU."""
        each = dense.detach() if dense.dim() == 3 else dense.detach().unsqueeze(0)
        matrices = [KeptMatrix(one.T if is_transposed else one) for one in each]
        return cls(matrices, dense.shape, dense.dtype, is_transposed)

    @property
    def compressed_bytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.matrices)

    def expanded(self) -> Tensor:
        """The dense weight."""
        each = [matrix.dense() for matrix in self.matrices]
        each = [one.T for one in each] if self.is_transposed else each
        dense = each[0] if self.dim() == 2 else torch.stack(each)
        return dense.to(self.dtype)

    def _reject_saving(self, *_: object) -> NoReturn:
        raise ConfigError(
            "accelerate: an accelerated model cannot be saved; save it before, or copy the folder "
            "that it was loaded from"
        )

    # What writers of files ask a tensor for.
    untyped_storage = storage = __reduce_ex__ = _reject_saving

    def __deepcopy__(self, memo: object) -> PrunedWeight:
        return self._like(self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = self.matrices[0].encoding.name if self.matrices else "mask"
        size = f"{self.compressed_bytes} bytes"
        return f"PrunedWeight({tuple(self.shape)}, {self.dtype}, {kind}, {size})"

    def _like(self, dtype: torch.dtype) -> PrunedWeight:
        return PrunedWeight(self.matrices, self.shape, dtype, self.is_transposed)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        product = _PRODUCTS.get(function)
        if product is not None and args and kwargs.keys() <= _NAMED:
            result = product(*args, **kwargs)
            if result is not NotImplemented:
                return result
        disabled: Any = torch._C.DisableTorchFunctionSubclass
        with disabled():
            return function(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own has no method to override
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        aten = torch.ops.aten
        first = args[0] if args else None
        if isinstance(first, PrunedWeight):
            if function in (aten.detach.default, aten.alias.default, aten.clone.default):
                return first._like(first.dtype)
            if function is aten._to_copy.default and _stays_here(kwargs):
                return first._like(kwargs.get("dtype") or first.dtype)
            if function._schema.is_mutable:
                raise TypeError(
                    f"{function}: a pruned weight cannot be changed; change the dense model, and "
                    "accelerate it then"
                )
        expand: Any = tree_map_only(PrunedWeight, PrunedWeight.expanded, (args, kwargs))
        return function(*expand[0], **expand[1])


def _stays_here(wanted: Mapping[str, Any]) -> bool:
    device, dtype = wanted.get("device"), wanted.get("dtype")
    is_here = device is None or torch.device(device).type == "cpu"
    return is_here and (dtype is None or dtype.is_floating_point)


# -- products -------------------------------------------------------------------------------------


def _product(x: Any, weight: Any, bias: Tensor | None = None, *, is_transposed: bool) -> Any:
    """`x Wᵀ + bias`; NotImplemented where torch's own has to be taken, with the dense weight."""
    if (
        not isinstance(weight, PrunedWeight)
        or isinstance(x, PrunedWeight)
        or weight.matrix is None
        or weight.is_transposed != is_transposed
        or not _fits(x, weight, bias)
    ):
        return NotImplemented
    return weight.matrix.multiply(x, bias)


def _fits(x: Tensor, weight: PrunedWeight, bias: Tensor | None) -> bool:
    """Whether an input and a bias have the right type and size and are used as they are, and the
    input needs no gradient."""
    rows, columns = weight.matrices[0].shape
    return (
        type(x) in _PLAIN
        and x.dtype == weight.computed
        and x.shape[-1:] == (columns,)
        and x.is_cpu
        and x.layout is torch.strided
        and not (x.requires_grad and torch.is_grad_enabled())
        and (bias is None or _is_addend(bias, (*x.shape[:-1], rows)))
        and not _is_transformed(x)
    )


def _is_transformed(tensor: Tensor) -> bool:
    """Whether autocast, a trace or `torch.func` changes what is computed with a tensor."""
    if torch.compiler.is_compiling():  # which cannot ask for it
        return False
    return bool(
        torch._C._is_any_autocast_enabled()
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
        or torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _is_addend(bias: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a bias can be added to a product of this shape, and has the shape of one row or of
    several."""
    return (
        type(bias) in _PLAIN
        and not _is_transformed(bias)
        and bias.is_cpu
        and bias.layout is torch.strided
        and bias.dim() <= len(shape)
        and all(size in (1, of) for size, of in zip(bias.shape[::-1], shape[::-1], strict=False))
    )


_matmul = partial(_product, is_transposed=True)


def _addmm(bias: Any, x: Any, weight: Any) -> Any:
    return _product(x, weight, bias, is_transposed=True)


def _item(weight: Any, index: Any) -> Any:
    is_number = isinstance(index, int) or (isinstance(index, Tensor) and index.dim() == 0)
    if not isinstance(weight, PrunedWeight) or weight.dim() != 3 or not is_number:
        return NotImplemented
    matrix = weight.matrices[int(index)]
    return PrunedWeight([matrix], weight.shape[1:], weight.dtype, weight.is_transposed)


def _turned(weight: Any) -> Any:
    if not isinstance(weight, PrunedWeight) or weight.dim() != 2:
        return NotImplemented
    shape = weight.shape[::-1]
    return PrunedWeight(weight.matrices, shape, weight.dtype, not weight.is_transposed)


_PLAIN = (Tensor, nn.Parameter)
_NAMED = {"weight", "bias"}
"""The arguments that a product may be given by name; others are left to torch."""
_turned_property: Any = Tensor.T
_PRODUCTS: Mapping[Any, Callable[..., Any]] = {
    functional.linear: partial(_product, is_transposed=False),
    torch.matmul: _matmul,
    torch.mm: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.addmm: _addmm,
    Tensor.__getitem__: _item,
    Tensor.t: _turned,
    torch.t: _turned,
    _turned_property.__get__: _turned,
}


class PrunedLinear(nn.Linear):
    """torch's linear layer where its weight is a `PrunedWeight`: the same results, sooner than by
    way of torch's dispatch."""

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self._parameters["weight"]
        bias = self._parameters["bias"]
        matrix = weight.matrix if isinstance(weight, PrunedWeight) else None
        if matrix is not None and _fits(x, weight, bias):
            return matrix.multiply(x, bias)
        return super().forward(x)


# -- models ---------------------------------------------------------------------------------------


def accelerate(model: nn.Module, *, fewest_zeros: float = FEWEST_ZEROS) -> nn.Module:
    """Have a pruned model multiply from the kept entries of its weights; returns the model.

    Each weight of a linear layer of which at least `fewest_zeros` are zeros, and each tensor of
    such weights of experts, is replaced by its kept entries in bf16, one after the other, and the
    dense weight is freed. Biases, embeddings, weights tied to them and all other parameters stay.
    The model computes as before, on the CPU and without gradients of these weights; save it before.

    Raises ConfigError for a model that is not on the CPU or a share outside of 0 to 1.
    """
    check_kind("accelerate: model", model, nn.Module, "give one of torch, as from_pretrained does")
    check_kinds("accelerate", locals(), fewest_zeros="number")
    if not 0 <= fewest_zeros <= 1:
        raise ConfigError(f"fewest_zeros: {fewest_zeros} is no share; choose 0.4")
    done: dict[int, nn.Parameter] = {}
    for module, name, parameter, is_transposed in list(multiplied_weights(model)):
        if parameter.device.type != "cpu":
            way = "load its weights first" if parameter.is_meta else "move the model by .to('cpu')"
            raise ConfigError(
                f"accelerate: {name} is on {parameter.device}, but kept entries are multiplied on "
                f"CPUs only; {way}"
            )
        if id(parameter) not in done and has_zeros(parameter, fewest_zeros):
            pruned = PrunedWeight.of(parameter, is_transposed=is_transposed)
            done[id(parameter)] = nn.Parameter(pruned, requires_grad=False)
        if id(parameter) in done:
            put(module, name.rpartition(".")[2], done[id(parameter)])
    finish(model, len(done))
    return model


def put(module: nn.Module, name: str, weight: nn.Parameter) -> None:
    """Put a pruned weight into its place in a module."""
    module._parameters[name] = weight
    if type(module) is nn.Linear:
        module.__class__ = PrunedLinear


def has_zeros(weight: Tensor, share: float) -> bool:
    """Whether at least this share of a weight's entries is zero."""
    return weight.numel() > 0 and int((weight == 0).sum()) >= share * weight.numel()


def finish(model: nn.Module, replaced: int) -> None:
    """Have transformers call experts one by one, and warn where nothing becomes faster."""
    if not replaced:
        warnings.warn("accelerate: no weight has enough zeros; the model stays dense", stacklevel=3)
        return
    choose: Any = getattr(model, "set_experts_implementation", None)
    if choose is not None and any(
        isinstance(each, PrunedWeight) and each.dim() == 3 for each in model.parameters()
    ):
        choose("eager")
    if not has_loops():
        warnings.warn(
            "accelerate: numba or AVX2 is missing; weights take less memory, but each is expanded "
            "for every token, which is slower than dense products",
            stacklevel=3,
        )


def multiplied_weights(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter, bool]]:
    """Each module that multiplies by a weight, the weight's name in the model, the weight, and
    whether it has inputs before outputs. Weights that are embeddings as well are left out."""
    embedded = {id(one.weight) for one in model.modules() if isinstance(one, nn.Embedding)}
    for prefix, module in model.named_modules():
        is_turned = type(module).__name__ == "Conv1D"  # transformers' linear layer of GPT-2
        is_linear = is_turned or isinstance(module, nn.Linear)
        is_own = not type(module).__module__.startswith("torch.")
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in embedded:
                continue
            if isinstance(parameter, PrunedWeight) or not parameter.is_floating_point():
                continue
            full = f"{prefix}.{name}" if prefix else name
            if is_linear and name == "weight" and parameter.dim() == 2:
                yield module, full, parameter, is_turned
            elif is_own and not is_linear and parameter.dim() == 3:
                yield module, full, parameter, bool(getattr(module, "is_transposed", False))
