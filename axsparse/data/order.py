"""The samples of each step: a pure function of (seed, step), without a stored permutation.

Epoch e visits every sample once, in an order keyed by (seed, e). Each position of the order is
computed by itself, so that memory does not grow with the data, and the samples of any step
can be computed directly. The method is a Feistel network with cycle walking (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

from __future__ import annotations

from math import isqrt

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8
"""Rounds of the network. Four suffice to look random among many samples; 10 samples need 8."""


def samples_of_step(
    num_samples: int, global_batch_size: int, step: int, seed: int
) -> NDArray[np.int64]:
    """The sample numbers of a step, (global_batch_size,), in global order.

    A batch may reach into the next epoch, or contain several epochs.
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
    """The epoch of each sample of a step, (global_batch_size,)."""
    first = step * global_batch_size
    return np.arange(first, first + global_batch_size, dtype=np.int64) // num_samples


def shuffled(
    positions: NDArray[np.int64], num_samples: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """The samples at these positions of an epoch: its permutation of [0, num_samples)."""
    entropy = np.random.SeedSequence(seed, spawn_key=(epoch,))
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
