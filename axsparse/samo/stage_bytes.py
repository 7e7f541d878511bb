"""What the state of a stage costs before it is built: the formula over a survey of layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from axsparse.models.survey import LayerInfo, ParameterInfo
from axsparse.samo.shards import share_bounds
from axsparse.samo.state_bytes import (
    VISITS,
    IndexKind,
    StateBytes,
    TensorSize,
    layer_bytes,
    owned_entries,
    visit_bytes,
)


def stage_bytes(
    layers: Sequence[LayerInfo],
    ties: Mapping[str, str],
    kept: Mapping[str, int],
    *,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    moments: int,
    index: IndexKind = "int32",
    split_master: bool = False,
    replicas: int = 1,
    replica: int | None = None,
    offload: bool = False,
) -> StateBytes:
    """Bytes of the state of these layers on one rank.

    `kept`: kept entries of the pruned tensors, by the name of a weight's first use.
    `replicas` above 1: those that shard the optimizer state, of which `replica` is meant, or the
    one that holds most. `offload`: masters and moments rest on the host.
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
        replica = _fullest(sizes, replicas)
    each = [
        layer_bytes(
            of_layer,
            half=dtype != torch.float32,
            gradient_bytes=gradient_dtype.itemsize,
            moments=moments,
            index=index,
            split_master=split_master,
            replicas=replicas,
            replica=replica,
        )
        + StateBytes(weight=layer.buffer_bytes)
        for layer, of_layer in zip(layers, sizes, strict=True)
    ]
    if not offload:
        return StateBytes.sum(each)
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
    """The replica whose shares of these layers are most together."""
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
