"""What the groups of one stage will exchange, so that a transport can connect it all beforehand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from axsparse.models.module_buffers import slots
from axsparse.runtime.communication import Exchange, Op
from axsparse.samo.layer_construction import BuiltLayer
from axsparse.samo.shards import BLOCK
from axsparse.samo.ties import Use


def replica_exchanges(layers: Sequence[BuiltLayer], wire_dtype: torch.dtype) -> list[Exchange]:
    """The operations of the ranks that hold the same layers, each on its largest buffer.

    Those are the sums of gradients, which travel as `wire_dtype`; with sharded state also the
    gathering of what each replica holds, at most in fp32; and the broadcast of buffers such as
    running statistics.
    """
    exchanges = []
    shares = [layer.state.shares for layer in layers]
    whole = max((share.bounds[-1] for share in shares if not share.is_sharded), default=0)
    if whole:
        exchanges.append(Exchange(Op.ALL_REDUCE, wire_dtype, whole))
    sharded = [share.bounds for share in shares if share.is_sharded and share.bounds[-1]]
    if sharded:
        bounds = tuple(max(sharded, key=max))
        exchanges.append(Exchange(Op.REDUCE_SCATTER, wire_dtype, bounds[-1], bounds))
        exchanges.append(Exchange(Op.ALL_GATHER, torch.float32, bounds[-1], bounds))
        # LAMB sums two numbers for each block.
        blocks = sum(-(-tensor.kept // BLOCK) for share in shares for tensor in share.owned)
        exchanges.append(Exchange(Op.ALL_REDUCE, torch.float64, 2 * blocks))
    buffers = max((_saved_bytes(layer) for layer in layers), default=0)
    if buffers:
        exchanges.append(Exchange(Op.BROADCAST, torch.uint8, buffers))
    return exchanges


def tie_exchange(use: Use) -> Exchange:
    """The sum of the gradients of a tied weight over the two stages that use it."""
    return Exchange(Op.ALL_REDUCE, use.gradient.dtype, use.gradient.numel())


def _saved_bytes(layer: BuiltLayer) -> int:
    return sum(slot.tensor.nbytes for slot in slots(layer.module) if slot.persists)
