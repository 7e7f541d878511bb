"""The bytes of a tensor, to be sent, written or hashed."""

from __future__ import annotations

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor's entries in their order, flat; a copy only where they lie
    otherwise in memory, or where torch has only noted that they are conjugates or negatives."""
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    # view(-1) would keep the stride of 0 that the one entry of an expanded tensor may have.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
