"""Kept positions on a GPU: made from a mask, read by kernels, and decoded again.

Encodings and bytes are the same as on the CPU (`samo/state_bytes.py`), with the same protocol
(`samo/index/base.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from axsparse.runtime.errors import ConfigError
from axsparse.samo.cuda.launch import CHUNK, Argument, Launcher, blocks_of, check
from axsparse.samo.state_bytes import (
    INT32_LIMIT,
    MASK_BLOCK,
    MASK_WORD,
    IndexKind,
    encoding_of,
    fits_int32,
)

DeviceKind: TypeAlias = Literal["full", "int32", "mask"]
"""How kept positions are stored; "full" stores nothing, since every entry is kept."""
INDICES: dict[DeviceKind, str] = {"full": "FullIndex", "int32": "Int32Index", "mask": "MaskIndex"}
"""The names of the encodings in the source."""
BITS = {2: "unsigned short", 4: "unsigned"}
"""The C++ type by which values of 2 or 4 bytes are moved."""


@dataclass(frozen=True)
class DeviceIndex:
    """The kept positions of one tensor, on its device."""

    launch: Launcher
    kind: DeviceKind
    numel: int
    kept: int
    device: torch.device
    entries: Tensor | None = None
    """int32: flat positions. mask: bits, the lowest of a byte first. None for full."""
    offsets: Tensor | None = None
    """mask: the number of kept entries before each block of dense ones, and the total; int32."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.entries, self.offsets) if tensor is not None)

    @property
    def on_device(self) -> DeviceIndex:
        return self

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """The arguments by which kernels get the index."""
        return self.entries, self.offsets, np.int64(self.kept), np.int64(self.numel)

    def gather(self, dense_D: Tensor, start: int, stop: int) -> Tensor:
        if self.kind == "full":
            return dense_D[start:stop]
        gathered_K = dense_D.new_empty(stop - start)
        self._move(dense_D, gathered_K, start, into_dense=False)
        return gathered_K

    def scatter(self, dense_D: Tensor, values_K: Tensor, start: int) -> None:
        if self.kind == "full":
            dense_D[start : start + values_K.numel()].copy_(values_K)
        else:
            self._move(dense_D, values_K, start, into_dense=True)

    def positions(self, device: torch.device | None = None) -> Tensor:
        """As in the protocol, on the index's device or computed on another one."""
        device = device or self.device
        if self.entries is None:
            return torch.arange(self.kept, device=device)
        entries = self.entries.to(device)
        if self.kind == "int32":
            return entries.long()
        bits = (entries[:, None] >> _places_of_bits(device)) & 1
        return bits.view(-1)[: self.numel].nonzero().view(-1)

    def _move(self, dense_D: Tensor, values_K: Tensor, start: int, *, into_dense: bool) -> None:
        stop = start + values_K.numel()
        assert 0 <= start <= stop <= self.kept, f"[{start}, {stop}) of {self.kept} kept entries"
        check(dense_D, "dense", (values_K.dtype,), self.numel)
        check(values_K, "values", (dense_D.dtype,), stop - start)
        self.launch(
            f"move<{INDICES[self.kind]}, {BITS[dense_D.itemsize]}>",
            blocks_of(stop - start, CHUNK),
            dense_D,
            *self.arguments,
            values_K,
            np.int64(start),
            np.int64(stop),
            np.int32(into_dense),
        )


def make_device_index(launch: Launcher, mask_D: Tensor, kind: IndexKind) -> DeviceIndex:
    """The index of a flat boolean mask (True: kept), on the mask's device.

    Waits for the device once, to learn how many are kept. Raises ConfigError for more kept
    entries than int32 can number, and where `encoding_of` does.
    """
    numel, device = mask_D.numel(), mask_D.device
    check(mask_D, "mask", (torch.bool,), numel)
    before = pad(_blocks(mask_D, MASK_BLOCK).sum(1).cumsum(0), (1, 0))
    kept = int(before[-1])
    if kept == numel:
        return DeviceIndex(launch, "full", numel, kept, device)
    if not fits_int32(kept):
        raise ConfigError(
            f"pruning.sparsity: on a GPU a pruned tensor keeps at most {INT32_LIMIT} entries and "
            f"this one keeps {kept}; prune more, or keep all of it"
        )
    if encoding_of(numel, kept, kind) == "int32":
        entries = mask_D.nonzero().view(-1).to(torch.int32)
        return DeviceIndex(launch, "int32", numel, kept, device, entries)
    bytes_of_bits = _blocks(mask_D, MASK_WORD).view(-1, 8) << _places_of_bits(device)
    bits = bytes_of_bits.sum(1, dtype=torch.uint8)
    return DeviceIndex(launch, "mask", numel, kept, device, bits, before.to(torch.int32))


def _blocks(mask_D: Tensor, size: int) -> Tensor:
    """A mask in rows of `size` entries, filled up with False."""
    return pad(mask_D, (0, -mask_D.numel() % size)).view(-1, size)


def _places_of_bits(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
