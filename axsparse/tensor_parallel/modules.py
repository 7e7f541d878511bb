"""Sharded parameters, and modules: linear layers, embeddings, experts, a vocabulary's loss.

Each of T tensor-parallel ranks holds one shard of the matrices that `Layer.tp_plan` names. A
column-parallel module has some outputs, and a row-parallel one some inputs, so that

    y = Σ_r row_r(between(column_r(x))) + bias

where all ranks have all of x and y. Parameters keep their names.

Shapes: B sequences of a microbatch, S tokens of each, H hidden size; I inputs and O outputs of a
linear module; t a token, v a word.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from axsparse.models.layer import Layer, LossFunction, Model, TensorShard, TpKind, TpStyle, on_meta
from axsparse.models.losses import (
    flat_targets,
    linear_cross_entropy,
    most_logits,
    reject_foreign_words,
)
from axsparse.models.sequential import HOOKS, TENSOR_HOOKS
from axsparse.runtime.errors import ConfigError, one_line
from axsparse.runtime.targets import IGNORED
from axsparse.tensor_parallel.group import (
    TensorGroup,
    copies_to_tp,
    copy_to_tp,
    gather_from_tp,
    log_total,
    reduce_from_tp,
    scatter_to_tp,
)

OF_MODULES = ("replicated", "experts")
"""Kinds that name a module; parameters inside it are sharded only where other entries name them."""


class UnevenError(ConfigError):
    """A number of ranks over which a model is not sharded; fewer, or one, may do."""


def styles_of(layer: Layer) -> dict[str, TpStyle]:
    """`Layer.tp_plan` with a `TpStyle` for each kind that is given by its name."""
    styles = {}
    for path, given in layer.tp_plan.items():
        style = TpStyle(given) if isinstance(given, str) else given  # type: ignore[arg-type]  # checked
        if not isinstance(style, TpStyle) or style.kind not in get_args(TpKind):
            raise ConfigError(
                f"layer {layer.name}: tp_plan has {given!r} for {path!r}, which is not known; give "
                f"one of {', '.join(get_args(TpKind))}, a TpStyle, or layout.g_tensor 1"
            )
        styles[path] = style
    return styles


def shards_of(
    layer: Layer,
    shapes: Mapping[str, tuple[int, ...]],
    index: int,
    count: int,
    key: str = "layout.g_tensor",
) -> dict[str, TensorShard]:
    """The shard of each sharded parameter that a rank of `count` holds, by the parameter's name
    within the layer.

    `shapes` has the layer's parameters. ConfigError for a module that the layer does not have or
    whose size `count` does not divide; `key` is the setting of the number of ranks.
    """
    shards = {}
    for path, style in styles_of(layer).items():
        is_column = style.kind in ("colwise", "gather_output")
        names = [f"{path}.weight"] + [f"{path}.bias"] * is_column
        found = [name for name in (names if names[0] in shapes else [path]) if name in shapes]
        if style.kind in OF_MODULES and any(name.startswith(f"{path}.") for name in shapes):
            continue
        if not found:
            matrices = [name.removesuffix(".weight") for name in shapes if len(shapes[name]) >= 2]
            nearest = ", ".join(get_close_matches(path, matrices or [*shapes], n=2, cutoff=0))
            raise ConfigError(
                f"layer {layer.name}: tp_plan names {path!r}, which has no weight; nearest: "
                f"{nearest}"
            )
        for name in found:
            last = len(shapes[name]) - 1
            dim = last if style.kind == "rowwise" else max(last - 1, 0)
            shards[name] = TensorShard(shapes[name], dim, index, count, style.packed)
            _check_size(layer.full_name(name), style, shards[name], key)
    return shards


def _check_size(name: str, style: TpStyle, shard: TensorShard, key: str) -> None:
    """UnevenError where a dimension has no N equal shards; shards of words may differ."""
    size, count = shard.full_shape[shard.dim], shard.count
    if style.kind == "vocabulary":
        if count > size:
            raise UnevenError(f"{key}: {count} ranks are more than the {size} words of {name}")
    elif size % (style.packed * style.unit * count):
        each = f" in groups of {style.unit}" if style.unit > 1 else ""
        raise UnevenError(
            f"{key}: {count} does not divide the {size // style.packed} outputs or inputs of "
            f"{name}{each}"
        )


def check_plan(layers: Iterable[Layer], name: str, key: str, *, fuses: bool) -> None:
    """ConfigError for a model that cannot be sharded; `fuses`: torch.compile fuses its layers."""
    if not any(layer.tp_plan for layer in layers):
        raise UnevenError(f"{key}: model {name} names no modules to shard (Layer.tp_plan)")
    if fuses:
        reason = "pipeline.compile true fuses layers, which are not sharded"
        raise ConfigError(f"{key}: {reason}; choose false there")


def check_ties(ties: Mapping[str, str], shards: Mapping[str, TensorShard]) -> None:
    """ConfigError where the two uses of a tied weight are not sharded alike."""
    for second, first in ties.items():
        if shards.get(first) != shards.get(second):
            raise ConfigError(
                f"tie {first} = {second}: the two uses are not sharded alike (Layer.tp_plan); "
                'give both "vocabulary", or neither'
            )


def _features(like: Tensor, size: int, weight: TensorShard) -> TensorShard:
    """The shard of activations whose last dimension, of this size, is sharded as a weight is."""
    shape = (*like.shape[:-1], size)
    return TensorShard(shape, like.dim() - 1, weight.index, weight.count, weight.packed)


class ColwiseLinear(nn.Module):
    """A linear module of some outputs: (…, I) to (…, O / T), or to (…, O) if they are gathered."""

    def __init__(
        self, linear: nn.Linear, shard: TensorShard, group: TensorGroup, *, gathers: bool
    ) -> None:
        super().__init__()
        has_bias = linear.bias is not None
        self.group, self.shard, self.gathers = group, shard, gathers
        self.product = nn.Linear(linear.in_features, shard.shape[0], bias=has_bias, device="meta")
        self.weight, self.bias = self.product.weight, self.product.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.product(self.group.shared_copy(x))
        if self.gathers:
            return gather_from_tp(self.group, _features(y, self.shard.full_shape[0], self.shard), y)
        return y


class RowwiseLinear(nn.Module):
    """A linear module of some inputs: (…, I / T), or of all inputs (…, I) its own, to (…, O)."""

    def __init__(self, linear: nn.Linear, shard: TensorShard, group: TensorGroup) -> None:
        super().__init__()
        self.group, self.shard = group, shard
        self.product = nn.Linear(shard.shape[1], linear.out_features, bias=False, device="meta")
        self.weight, self.bias = self.product.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        group, features = self.group, self.shard.full_shape[1]
        if x.shape[-1] == features:
            x = scatter_to_tp(group, _features(x, features, self.shard), x)
        group.end_sharded()
        total = reduce_from_tp(group, self.product(x))
        return total if self.bias is None else total + self.bias


class VocabularyEmbedding(nn.Module):
    """An embedding of some words: (B, S) integers to (B, S, H)."""

    def __init__(self, shard: TensorShard, group: TensorGroup) -> None:
        super().__init__()
        self.group, self.words, self.bounds = group, shard.full_shape[0], shard.bounds
        self.weight = nn.Parameter(torch.empty(shard.shape, device="meta"))

    def forward(self, tokens: Tensor) -> Tensor:
        reject_foreign_words(tokens, self.words)
        start, stop = self.bounds
        here = (tokens >= start) & (tokens < stop)
        rows = F.embedding((tokens - start).clamp(0, stop - start - 1), self.weight)
        return reduce_from_tp(self.group, rows.masked_fill(~here.unsqueeze(-1), 0))


class Replicated(nn.Module):
    """A module that every rank uses for its own heads or features; the gradients of its parameters
    are summed over the ranks.

    It has the module's own dictionaries of parameters and buffers, so that their names stay.
    """

    def __init__(self, module: nn.Module, group: TensorGroup) -> None:
        super().__init__()
        for kind in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[kind] = vars(module)[kind]
        vars(self)["_module"] = module
        self.training = module.training
        self.group = group

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        module = vars(self)["_module"]
        module.training = self.training
        parameters = dict(module.named_parameters())
        copies = copies_to_tp(self.group, list(parameters.values())) if parameters else ()
        return functional_call(module, dict(zip(parameters, copies, strict=True)), args, kwargs)


def _shard_experts(module: nn.Module, group: TensorGroup) -> None:
    """Have a module of sharded parameters return the sum over all ranks' shards."""

    def copied(value: Any) -> Any:
        is_number = isinstance(value, Tensor) and value.is_floating_point()
        return copy_to_tp(group, value) if is_number else value

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda *call: reduce_from_tp(group, call[-1]))


# -- of one layer -----------------------------------------------------------------------


@dataclass(frozen=True)
class Sharding:
    """The shards of a model's layers that the ranks of a group hold. A `LayerSharding`."""

    group: TensorGroup

    def shard(self, layer: Layer, module: nn.Module) -> dict[str, TensorShard]:
        """See `LayerSharding.shard`; ConfigError for a module that cannot be sharded."""
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        shards = shards_of(layer, shapes, self.group.rank, self.group.size)
        styles = styles_of(layer)
        for name in shards:
            path = name.rpartition(".")[0]
            replaced = module.get_submodule(path) if path in styles else None
            if _would_lose(replaced, module.get_parameter(name)):
                raise ConfigError(
                    f"layer {layer.name}: {name} is frozen, or it or its module has hooks, and is "
                    "not sharded; leave it out of tp_plan"
                )
        _replace_modules(layer, module, shards, self.group)
        kinds = {styles[path].kind for path in styles if f"{path}.weight" in shards}
        if "colwise" in kinds and "rowwise" not in kinds:
            raise ConfigError(
                f"layer {layer.name}: tp_plan has colwise modules and no rowwise one; what lies "
                "between the two is sharded, so name both, or gather (gather_output)"
            )
        if shards:
            vars(module)["forward"] = _with_shapes_named(layer.name, module.forward)
        return shards


def _would_lose(replaced: nn.Module | None, parameter: nn.Parameter) -> bool:
    """Whether a parameter, or its module that is replaced, has what the sharded one would lack."""
    return (
        not parameter.requires_grad
        or any(getattr(parameter, kind) for kind in TENSOR_HOOKS)
        or (replaced is not None and any(vars(replaced)[kind] for kind in HOOKS))
    )


def _replace_modules(
    layer: Layer, module: nn.Module, shards: Mapping[str, TensorShard], group: TensorGroup
) -> None:
    """Replace the parameters of `shards`, and the modules that use them."""
    styles = styles_of(layer)
    for path, style in styles.items():
        if style.kind in OF_MODULES:
            owner = module.get_submodule(path)
            if style.kind == "replicated":
                _replace(module, path, Replicated(owner, group))
                continue
            _check_inside(layer, path, owner, shards)
            _shard_experts(owner, group)
    for name, shard in shards.items():
        path, _, kind = name.rpartition(".")
        owner = module.get_submodule(path)
        if name in styles:  # a bare parameter, such as one that is handed to the loss
            owner._parameters[kind] = nn.Parameter(torch.empty(shard.shape, device="meta"))
        elif not isinstance(owner, ColwiseLinear):  # replaced with the weight before this bias
            _replace(module, path, _sharded(layer, path, owner, styles[path], shard, group))


FAILURES = (RuntimeError, ValueError, TypeError, IndexError)
"""The exact classes of torch's errors for shapes and types that do not fit, without subclasses."""
OF_DEVICES = re.compile("memory|device|CUDA")
"""Matches the texts of RuntimeErrors that do not come from the number of features."""


def _with_shapes_named(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of a sharded layer; ConfigError for shapes that may fit in a full one alone."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except FAILURES as error:
            if type(error) not in FAILURES or OF_DEVICES.search(str(error)):
                raise
            raise ConfigError(
                f"layer {name}: sharded (Layer.tp_plan), it fails with {one_line(error)}; "
                "take the number of heads or features from the tensor, use sharded modules by "
                "calling them only, or gather (gather_output)"
            ) from error

    return forward


# Reason: a module of a layer, and how it is sharded among whom.
def _sharded(
    layer: Layer,
    path: str,
    owner: nn.Module,
    style: TpStyle,
    shard: TensorShard,
    group: TensorGroup,
) -> nn.Module:
    if type(owner) is nn.Linear and style.kind == "rowwise":
        return RowwiseLinear(owner, shard, group)
    if type(owner) is nn.Linear and style.kind in ("colwise", "gather_output"):
        return ColwiseLinear(owner, shard, group, gathers=style.kind == "gather_output")
    is_plain = type(owner) is nn.Embedding and owner.padding_idx is None and not owner.max_norm
    if is_plain and style.kind == "vocabulary":
        return VocabularyEmbedding(shard, group)
    raise ConfigError(
        f"layer {layer.name}: {path} is {type(owner).__name__}, which is not sharded by "
        f"{style.kind!r}; name a plain nn.Linear or nn.Embedding in tp_plan, or leave it out"
    )


def _check_inside(
    layer: Layer, path: str, owner: nn.Module, shards: Mapping[str, TensorShard]
) -> None:
    """ConfigError if a parameter of experts is not sharded."""
    for name, parameter in owner.named_parameters():
        is_own = parameter.requires_grad and "." not in name
        if not is_own or f"{path}.{name}" not in shards:
            way = 'name it "colwise" or "rowwise" in tp_plan, or ' if is_own else ""
            raise ConfigError(
                f"layer {layer.name}: {path} is summed over ranks, so that {path}.{name} has to be "
                f"trained, its own, and sharded; {way}leave {path} out of tp_plan"
            )


def _replace(module: nn.Module, path: str, new: nn.Module) -> None:
    above, _, last = path.rpartition(".")
    setattr(module.get_submodule(above), last, new)


def sharded_products(module: nn.Module) -> set[nn.Module]:
    """The linear modules inside a module that multiply by shards."""
    kinds = (ColwiseLinear, RowwiseLinear)
    return {each.product for each in module.modules() if isinstance(each, kinds)}


# -- the loss of a sharded vocabulary ---------------------------------------------------


def vocabulary_cross_entropy(
    group: TensorGroup, words: int, hidden: Tensor, weight: Tensor, targets: Tensor
) -> Tensor:
    """`losses.linear_cross_entropy` with this rank's rows of a weight of `words` rows.

    loss = Σ_t log Σ_r exp(log Σ_{v on r} exp z[t, v]) − Σ_r z[t, y[t]]
    """
    flat, rows = hidden.reshape(-1, hidden.shape[-1]), flat_targets(targets)
    reject_foreign_words(rows, words, ignored=IGNORED)
    given = copy_to_tp(group, flat), weight, rows - group.rank * words // group.size
    if len(rows) * len(weight) > most_logits(rows.device) and torch.is_grad_enabled():
        total, hit = checkpoint(_totals, *given, use_reentrant=False, preserve_rng_state=False)
    else:
        total, hit = _totals(*given)
    losses = log_total(group, total) - reduce_from_tp(group, hit)
    return torch.where(rows != IGNORED, losses, 0).sum()


def _totals(hidden: Tensor, weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ_v exp z[t, v] over the words of this rank, and z at the target if it is one of them."""
    logits = F.linear(hidden, weight).float()
    here = (rows >= 0) & (rows < len(weight))
    columns = rows.clamp(0, len(weight) - 1).unsqueeze(1)
    return logits.logsumexp(1), here * logits.gather(1, columns).squeeze(1)


def sharded_loss(model: Model, group: TensorGroup) -> LossFunction | None:
    """The loss of a model whose last layer hands some words of its weight to it; None for another
    model. ConfigError for a loss that takes the full weight."""
    last = model.layers[-1]
    words = [path for path, style in styles_of(last).items() if style.kind == "vocabulary"]
    shapes = {name: p.shape for name, p in on_meta(last).named_parameters()} if words else {}
    for path in words:
        if path not in shapes:
            continue
        if model.loss is not linear_cross_entropy:
            raise ConfigError(
                f"layer {last.name}: tp_plan has 'vocabulary' for {path!r}, and the loss is not "
                "linear_cross_entropy, which alone takes some words; leave it out"
            )
        return partial(vocabulary_cross_entropy, group, shapes[path][0])
    return None
