"""Pruning of live state: dense tensors shrink to their kept entries, one at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from axsparse.runtime.host_channel import bytes_of
from axsparse.samo.layer_construction import BuiltLayer
from axsparse.samo.masks import Masks
from axsparse.samo.tensor_state import TensorState


def prune_in_place(layers: Iterable[BuiltLayer], ties: Mapping[str, str], masks: Masks) -> None:
    """Prune the tensors that the masks name; kept weights and their moments stay as they are.

    A tensor that is pruned already keeps some of its kept entries. `ties` maps the name of a
    weight's second use to its first. All replicas call this together.
    """
    layers = list(layers)
    for layer in layers:
        for tensor in layer.state.owned:
            owner = ties.get(tensor.name, tensor.name)
            if owner in masks.kept:
                mask_D = masks.mask(
                    owner,
                    tuple(tensor.parameter.shape),
                    partial(layer.state.dense_master, tensor.name),
                    within=kept_positions(tensor),
                )
                layer.state.remask(tensor.name, mask_D)
    for layer in layers:
        if any(tensor.alias_of is not None for tensor in layer.state.tensors):
            layer.state.refit()


def kept_positions(tensor: TensorState) -> Tensor | None:
    """Flat positions of the kept entries of a pruned tensor; None if the tensor is dense."""
    return None if tensor.kept == tensor.parameter.numel() else tensor.positions()


def masks_digest(layers: Iterable[BuiltLayer]) -> int:
    """A 52-bit hash (exact as a float) of which entries of which tensors are kept."""
    digest = hashlib.blake2b(digest_size=8)
    for layer in layers:
        for tensor in layer.state.owned:
            digest.update(f"{tensor.name} {tensor.kept} ".encode())
            if tensor.kept < tensor.parameter.numel():
                digest.update(tensor.positions().numpy().tobytes())
    return int.from_bytes(digest.digest(), "big") >> 12


def weights_digest(layers: Iterable[BuiltLayer]) -> int:
    """A 52-bit hash (exact as a float) of sums of the weights' bits; waits for a GPU once."""
    sums = {
        f"{layer.spec.name}.{name}": _sum_of_bits(weight.detach())
        for layer in layers
        for name, weight in layer.module.named_parameters()
    }
    found = torch.stack(list(sums.values())).cpu().tolist() if sums else []
    text = " ".join(f"{name} {bits}" for name, bits in zip(sums, found, strict=True))
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") >> 12


def _sum_of_bits(values: Tensor) -> Tensor:
    """The sum modulo 2⁶⁴ of all whole words of eight bytes, plus the bytes that are left."""
    raw = bytes_of(values)
    whole = raw.numel() // 8 * 8
    return raw[:whole].view(torch.int64).sum() + raw[whole:].sum()
