"""Which samples a step sees: a pure function of (seed, step), without a stored permutation.

Epoch e visits all samples once, in an order keyed by (seed, e). The order is computed
position by position, so that it costs no memory however large the data, and any step
can be asked for at once. The method is a Feistel network with cycle walking (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
"""Four make a permutation that looks random among many samples; among 10 it takes 8."""


def samples_of_step(
    num_samples: int, global_batch_size: int, step: int, seed: int
) -> NDArray[np.int64]:
    """The (global_batch_size,) sample numbers of a step, in global order.

    A batch may reach into the next epoch, or hold several epochs.
    """
    first = step * global_batch_size
    positions = np.arange(first, first + global_batch_size, dtype=np.int64) % num_samples
    epochs = epochs_of_step(num_samples, global_batch_size, step)
    samples = np.empty_like(positions)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        samples[chosen] = shuffled(positions[chosen], num_samples, seed, int(epoch))
    return samples


def epochs_of_step(num_samples: int, global_batch_size: int, step: int) -> NDArray[np.int64]:
    """The (global_batch_size,) epochs that the samples of a step belong to."""
    first = step * global_batch_size
    return np.arange(first, first + global_batch_size, dtype=np.int64) // num_samples


def shuffled(
    positions: NDArray[np.int64], num_samples: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Where an epoch's permutation of [0, num_samples) sends these positions."""
    entropy = np.random.SeedSequence(seed, spawn_key=(epoch,))
    keys = entropy.generate_state(ROUNDS, np.uint64).astype(np.uint64)
    # The network permutes all pairs of digits below `side`: [0, side²), a little more than
    # is needed. Who lands outside walks on; as a cycle it leads back inside.
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
    """Once per key: left, right <- right, left + F(right) mod side. Each round is invertible."""
    left, right = np.divmod(values, side)
    for key in keys:
        left, right = right, (left + _mix(right ^ key) % side) % side
    return left * side + right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Every bit of the input moves every bit of the output (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
