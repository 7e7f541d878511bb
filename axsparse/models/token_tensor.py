"""One tensor that stands for activations of which each member of a group has some tokens.

Behind a row split activations are sums over all members of a tensor group. Until a column split
needs the whole again, each member holds and computes some tokens of them, which Korthikanti et al.
(2022) call sequence parallelism: of C chunks of tokens those with the numbers of its chunks of
features.

Shapes: B sequences of a microbatch, S tokens of each, H features; C chunks, of which a member has
K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axsparse.models.tensor_group import (
    Cut,
    TensorGroup,
    gather,
    join,
    join_tokens,
    spread,
    spread_tokens,
    take,
)
from axsparse.runtime.canonical_form import canonical
from axsparse.runtime.errors import ConfigError

TRAVELLING = 6
"""Dimensions of a `TokenTensor` on its way from layer to layer, (1, 1, K, B, S / C, H), by which
the next layer knows it."""


class TokenTensor(Tensor):
    """Activations (B, S, H) of which this member has K chunks, each (B, S / C, H).

    Its shape is that of the whole. What torch does with each entry or each token by itself is done
    for each chunk by itself, so that operations have the same operands at every degree. For any
    other operation the members gather the whole first.
    """

    group: TensorGroup
    _chunks: tuple[Tensor, ...]
    _known: dict[bool, tuple[list[int], Tensor]]
    """The whole, once it has been gathered without a graph or with one, and the versions that the
    chunks had then."""

    @property
    def chunks(self) -> tuple[Tensor, ...]:
        """What this member has; ConfigError for what an autograd.Function returns, since autograd
        does not see the chunks in it."""
        with torch._C.DisableTorchFunctionSubclass():
            is_made = self.grad_fn is not None
        if is_made:
            raise ConfigError(
                "layout.g_tensor: an autograd.Function gets activations of which each member has "
                "some tokens, which autograd does not see in it; give it x.view(x.shape)"
            )
        return self._chunks

    @property
    def cut(self) -> Cut:
        """Where the chunks lie in the whole."""
        sequences, tokens, features = self.chunks[0].shape
        return Cut((sequences, tokens * self.group.chunks, features), 1, 1, self.group.chunks)

    def whole(self) -> Tensor:
        """The whole, on all members, which call this together; what follows is alike on them."""
        has_graph, versions = torch.is_grad_enabled(), self.versions
        known = self._known.get(has_graph)
        if known is None or known[0] != versions:
            known = self._known[has_graph] = versions, gather(self.group, self.cut, self.chunks)
        return known[1]

    @property
    def versions(self) -> list[int]:
        """The versions of the chunks, which writes change."""
        return [chunk._version for chunk in self.chunks]

    def for_chunks(self) -> tuple[Tensor, ...]:
        """The whole for each chunk of features, whose gradients are added."""
        return spread_tokens(self.group, self.cut, self.chunks)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        itself = args[0] if args and isinstance(args[0], TokenTensor) else None
        if itself is not None and func in _OF_KIND:
            return func(itself.chunks[0], *args[1:], **kwargs)
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        name = getattr(func, "__name__", "")
        writes = name in _WATCHING or (name[-1:] == "_" and name[-2:] != "__")
        if itself is not None and func in _IN_PLACE and _is_written(func, args, kwargs):
            return itself
        if func is torch.autograd.grad or (itself is not None and writes):
            raise ConfigError(
                f"layout.g_tensor: {name} writes into activations of which each member has some "
                "tokens, or watches them; use an operation that returns another tensor"
            )
        results = _by_token(func, args, kwargs) if _is_by_token(func, args, kwargs) else None
        return func(*whole_in(args), **whole_in(kwargs)) if results is None else results


def by_tokens(group: TensorGroup, chunks: Sequence[Tensor]) -> Tensor:
    """Activations (B, S, H) of which this member has these chunks, each (B, S / C, H)."""
    first = chunks[0]
    sequences, tokens, features = first.shape
    shape = sequences, tokens * group.chunks, features
    # Nothing is on this device, so that torch raises where it does not go by way of the chunks.
    shell = torch.empty(shape, dtype=first.dtype, device="meta")
    together: TokenTensor = Tensor._make_subclass(TokenTensor, shell, first.requires_grad)
    together.group, together._chunks, together._known = group, tuple(chunks), {}
    return together


def joined(group: TensorGroup, parts: Sequence[Tensor]) -> Tensor:
    """The sum over all chunks, from the parts of this member: by tokens, if these give chunks, and
    else on all members."""
    shape = parts[0].shape
    if len(shape) != 3 or not shape[1] or shape[1] % group.chunks:
        return join(group, parts)
    cut = Cut(tuple(shape), 1, 1, group.chunks)
    return by_tokens(group, join_tokens(group, cut, parts))


def whole_in(value: Any) -> Any:
    """A value in which each `TokenTensor`, also in tuples, lists and dictionaries, is the whole."""
    if isinstance(value, TokenTensor):
        return value.whole()
    if isinstance(value, dict):
        return {name: whole_in(each) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(whole_in(each) for each in value)
    return value


# -- from layer to layer ----------------------------------------------------------------


def call_layer(
    group: TensorGroup,
    module: Callable[..., object],
    parameters: Iterable[nn.Parameter],
    inputs: Sequence[Tensor],
    *,
    is_last: bool,
) -> object:
    """What a layer of a cut model returns for what the layer before it returned.

    `parameters` are those of the layer that are not cut. What some members have of activations
    travels as one tensor of theirs; the last layer returns the whole.
    """
    vectors = [p for p in parameters if p.dim() == 1 and p.requires_grad]
    if vectors and torch.is_grad_enabled():
        # One sum over the members for the gradients of all that the layer uses token by token.
        each, copies = len(group.own), spread(group, *vectors)
        group.copies = {p: copies[n * each : (n + 1) * each] for n, p in enumerate(vectors)}
    try:
        outputs = module(*(_arrived(group, each) for each in inputs))
    finally:
        group.end_layer()
    leaving = whole_in if is_last else _leaving
    if isinstance(outputs, (tuple, list)):  # named ones too
        return tuple(leaving(each) for each in outputs)
    return leaving(outputs)


def _arrived(group: TensorGroup, given: Tensor) -> Tensor:
    if given.dim() != TRAVELLING:
        return given
    if len(group.own) == 1:
        return by_tokens(group, [given[0, 0, 0]])
    # Kernels may add in another order where memory is aligned otherwise.
    return by_tokens(group, [canonical(chunk) for chunk in given[0, 0].unbind()])


def _leaving(output: Any) -> Any:
    if isinstance(output, TokenTensor):
        chunks = output.chunks
        return (torch.stack(chunks) if len(chunks) > 1 else chunks[0][None])[None, None]
    if isinstance(output, Tensor) and output.dim() == TRAVELLING:
        raise ConfigError(
            f"layout.g_tensor: a layer returns a tensor of {TRAVELLING} dimensions, as members "
            "mark activations of which each has some tokens; return another shape"
        )
    return output


# -- one operation ----------------------------------------------------------------------


def _named(*names: str) -> set[Callable[..., Any]]:
    """The functions and methods of torch that have these names."""
    owners = (torch, Tensor, F)
    return {getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)}


def _getters(*names: str) -> set[Callable[..., Any]]:
    """What torch calls for these attributes of tensors."""
    return {getattr(Tensor, name).__get__ for name in names}


_OF_SHAPE = _getters("shape", "ndim") | _named("size", "dim", "numel", "__len__")
"""What the shape of the whole answers."""
_OF_KIND = _named("is_floating_point", "is_complex", "new_zeros", "new_ones", "new_empty")
_OF_KIND |= _getters("dtype", "device", "layout", "requires_grad", "is_cuda", "is_meta")
"""What any chunk answers."""
_WATCHING = {"__setitem__", "__set__", "retain_grad", "register_hook"} | {
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow")
}
"""Names of what would not come back to the chunks, beside names that end in an underscore."""
_ENTRYWISE = _named(
    *("add", "sub", "rsub", "mul", "div", "true_divide", "pow", "neg", "where"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__rtruediv__", "__pow__", "__neg__"),
    *("square", "sqrt", "rsqrt", "abs", "clone", "detach", "contiguous"),
    *("to", "float", "half", "bfloat16", "double", "type_as"),
)
"""What is computed for each entry by itself."""
_IN_PLACE = _named(
    *("add_", "sub_", "mul_", "div_", "__iadd__", "__isub__", "__imul__", "__itruediv__"),
)
"""The same, in place."""
_PLAIN = (getattr(Tensor.__torch_function__, "__func__", None), nn.Parameter.__torch_function__)
"""What torch calls for operations of tensors that have no rules of their own."""
_NORMS = _named("layer_norm", "rms_norm")
_MEANS = _named("mean", "sum")


def _is_by_token(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function computes each token by itself, with these arguments."""
    if "out" in kwargs:
        return False
    if func in _NORMS:
        shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
        return len(shape) == 1
    if func in _MEANS:
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        keeps = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        return bool(keeps) and dim in (-1, 2, [-1], [2], (-1,), (2,))
    return func in _ENTRYWISE


def _by_token(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Tensor | None:
    """The result of a function that computes each token by itself; None if the shape of an argument
    does not say which of it belongs to a token."""
    values = (*args, *kwargs.values())
    first = next(value for value in values if isinstance(value, TokenTensor))
    each = [_parts(first, value) for value in values]
    known = [parts for parts in each if parts is not None]
    if len(known) != len(each):
        return None
    results = []
    for parts in zip(*known, strict=True):
        named = dict(zip(kwargs, parts[len(args) :], strict=True))
        results.append(func(*parts[: len(args)], **named))
    return by_tokens(first.group, results)


def _is_written(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation in place could be done on each chunk."""
    try:
        return _by_token(func, args, kwargs) is not None
    except RuntimeError:  # as on one of several chunks that share what the layer before returned
        return False


def _parts(first: TokenTensor, value: Any) -> Sequence[Any] | None:
    """What each chunk gets of an argument, which broadcasting aligns with `first`."""
    group, count = first.group, len(first.chunks)
    if isinstance(value, TokenTensor):
        return value.chunks
    if not isinstance(value, Tensor):
        return (value,) * count
    own = type(value).__torch_function__
    if getattr(own, "__func__", own) not in _PLAIN:  # such as chunks of features
        return None
    if value.dim() < 2 or (value.dim() <= 3 and value.shape[-2] == 1):  # alike for all tokens
        if not (torch.is_grad_enabled() and value.requires_grad):
            return (value,) * count
        return group.copies.get(value) or spread(group, value)
    tokens = first.chunks[0].shape[1] * group.chunks
    if value.dim() > 3 or value.shape[-2] != tokens:
        return None
    return take(group, Cut(tuple(value.shape), value.dim() - 2, 1, group.chunks), value)


def _dropout(given: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Dropout with the numbers that the whole would draw, since all members draw them."""
    if not (p and training):
        return given
    numbers = F.dropout(torch.ones(given.shape, dtype=given.dtype, device=given.device), p)
    return given.mul_(numbers) if inplace else given * numbers
