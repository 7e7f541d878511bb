"""Checks that replicas start alike: what each adds to weights and masks is the same."""

from __future__ import annotations

import torch

from axsparse.runtime.communication import Op
from axsparse.runtime.errors import TrainingError
from axsparse.runtime.grid import Place
from axsparse.samo.shards import Replicas


def refuse_unequal_weights(digest: int, replicas: Replicas, place: Place) -> None:
    """TrainingError if a replica of this stage starts at other weights than replica 0.

    `digest` is this rank's, from `weights_digest`. All replicas call this together.
    """
    odd = _odd_replica(digest, replicas)
    if odd is not None:
        raise TrainingError(
            f"weights: replica {odd} starts at others than replica 0 on stage {place.stage}; draw "
            "them from torch's generator, which has the same seed everywhere, or in `init` from "
            "the one that is given, on hosts of one kind"
        )


def refuse_unequal_masks(digest: int, replicas: Replicas, place: Place) -> None:
    """TrainingError if a replica of this stage keeps other entries than replica 0.

    `digest` is this rank's, from `masks_digest`. All replicas call this together.
    """
    odd = _odd_replica(digest, replicas)
    if odd is not None:
        raise TrainingError(
            f"masks: replica {odd} keeps other entries than replica 0 on stage {place.stage}; "
            "masks must depend on seed, names and weights only"
        )


def _odd_replica(digest: int, replicas: Replicas) -> int | None:
    """The first replica with another digest than replica 0; None if all are equal."""
    digests = torch.zeros(replicas.size, dtype=torch.float64)
    digests[replicas.rank] = digest
    replicas.exchange(Op.ALL_REDUCE, digests)
    found: list[float] = digests.tolist()
    return next((replica for replica, own in enumerate(found) if own != found[0]), None)
