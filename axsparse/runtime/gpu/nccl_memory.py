"""What NCCL takes of a GPU's memory, which nothing says before it has connected."""

from __future__ import annotations

from collections.abc import Callable

import torch

from axsparse.runtime.communication import Backoff, Closable, Exchange, Op
from axsparse.runtime.gpu.device_protocol import Connections, Device
from axsparse.runtime.gpu.nccl_collective import NcclCollective

TRIED = Exchange(Op.ALL_REDUCE, torch.bfloat16, 1 << 23)
"""A sum as large as those of gradients: NCCL takes memory for each of its algorithms, by size."""


def free_beside_nccl(
    connections: Connections,
    device: Device,
    ranks: tuple[int, int],
    backoff: Backoff,
    free_bytes: Callable[[], int],
) -> int:
    """The bytes that are free on this rank's GPU while it has the most connections that a run
    makes, here all to one other rank; they are closed again.

    These are an edge in and out on either side of a stage, a group of replicas, and one of a tied
    weight. Both ranks call this together, `ranks` being equal for both.
    """
    one, other = ranks
    made: list[Closable] = []
    for number, (source, target) in enumerate([(one, other), (other, one)] * 2):
        made.append(connections.edge(f"trial edge {number}", source, target))
    for number in range(2):
        communicator = connections.communicator(f"trial group {number}", ranks)
        made.append(communicator)
        NcclCollective(communicator, device, backoff).warm_up([TRIED])
    free = free_bytes()
    for connection in reversed(made):
        connection.close()
    return free
