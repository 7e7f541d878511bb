"""The samples of each step."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from axsparse.data.order import samples_of_step, shuffled

SEEDS = st.integers(0, 2**70)


def epoch_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return shuffled(np.arange(num_samples), num_samples, seed, epoch)


@settings(deadline=None)
@example(num_samples=64, seed=5, epoch=0)  # a square, none of which lies outside
@given(num_samples=st.integers(1, 5000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_an_epoch_visits_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_samples, seed, epoch)

    assert sorted(order) == list(range(num_samples))


@settings(deadline=None)
@given(
    num_samples=st.integers(1, 50),
    global_batch_size=st.integers(1, 130),
    seed=SEEDS,
    num_steps=st.integers(1, 5),
)
def test_steps_walk_through_the_epochs_without_a_gap(
    num_samples: int, global_batch_size: int, seed: int, num_steps: int
) -> None:
    seen = np.concatenate(
        [samples_of_step(num_samples, global_batch_size, step, seed) for step in range(num_steps)]
    )

    num_epochs = -(-len(seen) // num_samples)
    expected = np.concatenate(
        [epoch_order(num_samples, seed, epoch) for epoch in range(num_epochs)]
    )
    assert seen.tolist() == expected[: len(seen)].tolist()


def test_a_step_of_a_huge_data_set_costs_only_its_batch() -> None:
    # A stored permutation of these would take 8 EB.
    samples = samples_of_step(10**18, global_batch_size=64, step=10**15, seed=5)

    assert len(set(samples)) == 64
    assert 0 <= samples.min() < 2 * 10**17 < 8 * 10**17 < samples.max() < 10**18


def test_the_order_stays_what_it_was() -> None:
    """A resumed run must continue in the order it began with, on any machine and version."""
    assert samples_of_step(1000, global_batch_size=8, step=124, seed=1234).tolist() == [
        *(739, 850, 180, 429, 36, 947, 990, 721)
    ]
