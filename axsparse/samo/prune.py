"""Pruning of live state: dense tensors shrink to their kept entries, one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial

from axsparse.pruning.criteria import Criterion
from axsparse.samo.construct import BuiltLayer


def prune_in_place(
    layers: Iterable[BuiltLayer], ties: Mapping[str, str], criterion: Criterion
) -> None:
    """Prune what the criterion names; kept weights and their moments carry over exactly."""
    layers = list(layers)
    for layer in layers:
        for tensor in layer.state.owned:
            shape = tuple(tensor.parameter.shape)
            if criterion.prunes(layer.spec.kind, shape):
                mask = criterion.mask(
                    ties.get(tensor.name, tensor.name),
                    partial(layer.state.master, tensor.name),
                    tensor.parameter.numel(),
                )
                layer.state.remask(tensor.name, mask)
    for layer in layers:
        if any(tensor.alias_of is not None for tensor in layer.state.tensors):
            layer.state.refit()


def masks_digest(layers: Iterable[BuiltLayer]) -> int:
    """A 52-bit number (exact as a float) of which entries of which tensors are kept."""
    digest = hashlib.blake2b(digest_size=8)
    for layer in layers:
        for tensor in layer.state.owned:
            digest.update(f"{tensor.name} {tensor.kept} ".encode())
            if tensor.kept < tensor.parameter.numel():
                digest.update(tensor.index.positions().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big") >> 12
