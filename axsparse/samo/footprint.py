"""What the state of a stage costs before it is built: the formula over a survey of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from axsparse.models.survey import LayerInfo
from axsparse.pruning.criteria import Criterion
from axsparse.samo.memory import IndexKind, StateBytes, TensorSize, tensor_bytes


def stage_bytes(
    layers: Sequence[LayerInfo],
    ties: Mapping[str, str],
    criterion: Criterion | None,
    *,
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    moments: int,
    index: IndexKind = "int32",
    split_master: bool = False,
) -> StateBytes:
    """Bytes of the state of these layers on one rank; `criterion` None is dense."""
    here = {parameter.name for layer in layers for parameter in layer.parameters}
    parts = []
    for layer in layers:
        for parameter in layer.parameters:
            numel = parameter.numel
            pruned = (
                criterion is not None
                and parameter.trained
                and criterion.prunes(layer.kind, parameter.shape)
            )
            size = TensorSize(
                numel,
                criterion.kept(numel) if criterion is not None and pruned else numel,
                trained=parameter.trained,
                is_alias=ties.get(parameter.name) in here,
            )
            parts.append(
                tensor_bytes(
                    size,
                    half=dtype != torch.float32,
                    gradient_bytes=gradient_dtype.itemsize,
                    moments=moments,
                    index=index,
                    split_master=split_master,
                )
            )
    return StateBytes.sum(parts)
