"""The bytes of the state of a stage before it is built, from a survey of its layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from axsparse.models.survey import LayerInfo, ParameterInfo
from axsparse.samo.shards import share_bounds
from axsparse.samo.state_bytes import (
    VISITS,
    StateBytes,
    StateFormat,
    TensorSize,
    layer_bytes,
    owned_entries,
    visit_bytes,
)


def stage_bytes(
    layers: Sequence[LayerInfo],
    ties: Mapping[str, str],
    kept: Mapping[str, int],
    stored: StateFormat,
    replica: int | None = None,
) -> StateBytes:
    """Bytes of the state of these layers on one rank.

    `ties` maps the name of a weight's second use to its first. `kept` has the number of kept
    entries of each pruned tensor, by the name of its first use. Where the optimizer state is
    sharded, `replica` is the one that is asked about; None means the one that holds most.
    """
    here = {parameter.name for layer in layers for parameter in layer.parameters}
    sizes = [
        [
            _size(parameter, kept, ties, is_alias=ties.get(parameter.name) in here)
            for parameter in layer.parameters
        ]
        for layer in layers
    ]
    if replica is None:
        replica = _fullest(sizes, stored.replicas)
    each = [
        layer_bytes(of_layer, stored, replica) + StateBytes(weight=layer.buffer_bytes)
        for layer, of_layer in zip(layers, sizes, strict=True)
    ]
    if not stored.offload:
        return StateBytes.sum(each)
    moments = stored.moments
    visits = [
        visit_bytes([state.master, *[state.optimizer // max(moments, 1)] * moments])
        for state in each
    ]
    return replace(
        StateBytes.sum(each),
        master=0,
        optimizer=0,
        visiting=VISITS * max(visits, default=0),
        offloaded=sum(state.master + state.optimizer for state in each),
    )


def _fullest(sizes: Iterable[Sequence[TensorSize]], replicas: int) -> int:
    """The replica whose shares of these layers have the most entries in total."""
    if replicas == 1:
        return 0
    held = [0] * replicas
    for kept, times in Counter(tuple(map(owned_entries, of_layer)) for of_layer in sizes).items():
        for replica, (begin, end) in enumerate(pairwise(share_bounds(kept, replicas))):
            held[replica] += times * (end - begin)
    return held.index(max(held))


def _size(
    parameter: ParameterInfo, kept: Mapping[str, int], ties: Mapping[str, str], *, is_alias: bool
) -> TensorSize:
    numel = parameter.numel
    stays = kept.get(ties.get(parameter.name, parameter.name), numel)
    return TensorSize(
        numel, stays if parameter.trained else numel, trained=parameter.trained, is_alias=is_alias
    )
