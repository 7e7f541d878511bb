"""Checks that all replicas have the same weights and masks, at the start and as they train."""

from __future__ import annotations

import torch

from axsparse.data_parallel.agreement import Verdict
from axsparse.runtime.communication import Op
from axsparse.runtime.errors import TrainingError, everywhere
from axsparse.runtime.grid import Grid, Place
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


def refuse_drifted_weights(verdict: Verdict, step: int, grid: Grid) -> None:
    """TrainingError on all ranks if a replica has come to other weights than replica 0."""
    if verdict.drifted is not None:
        place = grid.place(verdict.drifted)
        raise everywhere(
            TrainingError(
                f"step {step}: weights: replica {place.replica} has come to others than replica 0 "
                f"on stage {place.stage}; look for code that writes to weights beside the "
                "optimizer (through .data in a forward, say), or for bad memory of a host; resume "
                "from a checkpoint before that"
            )
        )


def _odd_replica(digest: int, replicas: Replicas) -> int | None:
    """The first replica with another digest than replica 0; None if all are equal."""
    digests = torch.zeros(replicas.size, dtype=torch.float64)
    digests[replicas.rank] = digest
    replicas.exchange(Op.ALL_REDUCE, digests)
    found: list[float] = digests.tolist()
    return next((replica for replica, own in enumerate(found) if own != found[0]), None)
