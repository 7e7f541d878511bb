"""The samples of each step: a pure function of (seed, step), without a stored permutation.

Epoch e visits every sample once, in an order keyed by (seed, e). Each position of the order is
computed by itself, so that memory does not grow with the data, and the samples of any step
can be computed directly. The method is a Feistel network with cycle walking (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

In a blend of several sources the positions are divided into blocks, in which every source has as
many places as its weight says, in an order that is shuffled as well; each source is visited in
separate epochs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
"""Rounds of the network. Four suffice to look random among many samples; 10 samples need 8."""
BLOCK = 10_000
"""Positions of a block of a blend."""


class Share(NamedTuple):
    """One source of a blend: its samples, and how many of the `BLOCK` positions of a block are read
    from it, at least 1."""

    samples: int
    places: int


def samples_of_step(
    num_samples: int, global_batch_size: int, step: int, seed: int
) -> NDArray[np.int64]:
    """The sample numbers of a step, (global_batch_size,), in global order, maybe of several
    epochs."""
    return _in_epochs(_positions(global_batch_size, step), num_samples, seed)


def blended_step(
    shares: Sequence[Share], global_batch_size: int, step: int, seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The sample numbers of a step of a blend, and the epoch of its source that each belongs to.

    Both are (global_batch_size,). Samples are numbered through all sources, one after the other.
    The places of all shares are `BLOCK` together.
    """
    positions = _positions(global_batch_size, step)
    blocks, places = np.divmod(positions, BLOCK)
    for block in np.unique(blocks):
        chosen = blocks == block
        # The 0 keys the order of a block; the orders of the sources are numbered from 1 on.
        places[chosen] = shuffled(places[chosen], BLOCK, seed, int(block), 0)
    samples, epochs = np.empty_like(positions), np.empty_like(positions)
    first_place = first_sample = 0
    for number, share in enumerate(shares, 1):
        chosen = (places >= first_place) & (places < first_place + share.places)
        read = blocks[chosen] * share.places + places[chosen] - first_place
        samples[chosen] = first_sample + _in_epochs(read, share.samples, seed, number)
        epochs[chosen] = read // share.samples
        first_place += share.places
        first_sample += share.samples
    return samples, epochs


def interleaved(shares: Sequence[Share], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The sample numbers at positions of an order that visits every sample of all sources once, in
    which each source has its part of the samples before any position."""
    samples: NDArray[np.int64] = positions.copy()
    left = np.ones(positions.shape, dtype=np.bool_)
    together = sum(share.samples for share in shares)
    for share in reversed(shares):
        # The positions of this source and of those before it are divided between the two.
        before = positions * share.samples // together
        is_next = (positions + 1) * share.samples // together > before
        together -= share.samples
        samples[left & is_next] = together + before[left & is_next]
        left &= ~is_next
        positions = positions - before
    return samples


def places_of(weights: Sequence[float]) -> list[int]:
    """The places of a block that sources of these weights have, by largest remainders."""
    shares = [weight / sum(weights) * BLOCK for weight in weights]
    places = [int(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda number: places[number] - shares[number])
    for number in order[: BLOCK - sum(places)]:
        places[number] += 1
    return places


def _positions(global_batch_size: int, step: int) -> NDArray[np.int64]:
    first = step * global_batch_size
    return np.arange(first, first + global_batch_size, dtype=np.int64)


def _in_epochs(
    positions: NDArray[np.int64], num_samples: int, seed: int, *source: int
) -> NDArray[np.int64]:
    """The samples at these positions of one epoch after the other."""
    epochs, samples = np.divmod(positions, num_samples)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        samples[chosen] = shuffled(samples[chosen], num_samples, seed, int(epoch), *source)
    return samples


def shuffled(
    positions: NDArray[np.int64], num_samples: int, seed: int, epoch: int, *source: int
) -> NDArray[np.int64]:
    """The samples at these positions of an epoch: its permutation of [0, num_samples), which is
    another for each `source` of a blend."""
    entropy = np.random.SeedSequence(seed, spawn_key=(epoch, *source))
    keys = entropy.generate_state(ROUNDS, np.uint64).astype(np.uint64)
    # The network permutes all pairs of digits below `side`, hence [0, side²), which is a little
    # larger than [0, num_samples). A value that lands outside is permuted again, until it is
    # inside: its cycle leads back there.
    side = np.uint64(isqrt(num_samples - 1) + 1)
    samples = positions.astype(np.uint64)
    outside = np.ones(samples.shape, dtype=np.bool_)
    while outside.any():
        samples[outside] = _network(samples[outside], side, keys)
        outside = samples >= num_samples
    return samples.astype(np.int64)


def _network(
    values: NDArray[np.uint64], side: np.uint64, keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """One invertible round for each key: left, right ← right, (left + F(right)) mod side."""
    left, right = np.divmod(values, side)
    for key in keys:
        left, right = right, (left + _mix(right ^ key) % side) % side
    return left * side + right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64: every bit of the input affects every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
