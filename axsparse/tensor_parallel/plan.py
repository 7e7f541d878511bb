"""Which parameters of a layer are sharded over tensor-parallel ranks, by its `Layer.tp_plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import get_args

from axsparse.models.layer import Layer, TpKind, TpStyle
from axsparse.models.tensor_shard import TensorShard
from axsparse.runtime.errors import ConfigError

OF_MODULES = ("replicated", "experts")
"""Kinds that name a module; parameters inside it are sharded only where other entries name them."""


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
    whose size `count` does not divide; `key` is the setting that asks for so many ranks.
    """
    shards = {}
    for path, style in styles_of(layer).items():
        is_column = style.kind in ("colwise", "gather_output")
        names = [f"{path}.weight"] + [f"{path}.bias"] * is_column
        found = [name for name in (names if names[0] in shapes else [path]) if name in shapes]
        if style.kind in OF_MODULES and any(name.startswith(f"{path}.") for name in shapes):
            continue
        if not found:
            nearest = ", ".join(get_close_matches(path, [*shapes], n=2, cutoff=0))
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
    """ConfigError where a dimension has no N equal shards; shards of words may differ."""
    size, count = shard.full_shape[shard.dim], shard.count
    if style.kind == "vocabulary":
        if count > size:
            raise ConfigError(
                f"{key}: {count} ranks are more than the {size} words of {name}; choose fewer"
            )
    elif size % (style.packed * style.unit * count):
        raise ConfigError(
            f"{key}: {count} does not divide the {size // style.packed} outputs or inputs of "
            f"{name}, of which {style.unit} stay together; choose a number that does"
        )


def check_plan(layers: Iterable[Layer], name: str, key: str, *, fuses: bool) -> None:
    """ConfigError for a model that cannot be sharded at all; `fuses` says that torch.compile fuses
    its layers."""
    reason = ""
    if not any(layer.tp_plan for layer in layers):
        reason = f"model {name} names no modules to shard (Layer.tp_plan)"
    elif fuses:
        reason = "pipeline.compile fuses layers, which are not sharded then"
    if reason:
        raise ConfigError(f"{key}: {reason}; choose another value there, or layout.g_tensor 1")


def check_ties(ties: Mapping[str, str], shards: Mapping[str, TensorShard]) -> None:
    """ConfigError where the two uses of a tied weight are not sharded alike."""
    for second, first in ties.items():
        if shards.get(first) != shards.get(second):
            raise ConfigError(
                f"tie {first} = {second}: the two uses are not sharded alike (Layer.tp_plan); "
                'give both "vocabulary", or neither'
            )
