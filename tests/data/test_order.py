"""The samples of each step, and of a blend: how often each source is read, in which order."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from axsparse.data.batches import Batches
from axsparse.data.dataset import ArrayDataset, TokenDataset
from axsparse.data.order import (
    BLOCK,
    Share,
    blended_step,
    interleaved,
    places_of,
    samples_of_step,
    shuffled,
)
from axsparse.data.sources import Blend

SEEDS = st.integers(0, 2**70)


def epoch_order(num_samples: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return shuffled(np.arange(num_samples), num_samples, seed, epoch)


@example(num_samples=64, seed=5, epoch=0)  # a square, none of which lies outside
@given(num_samples=st.integers(1, 5000), seed=SEEDS, epoch=st.integers(0, 10**6))
def test_an_epoch_visits_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = epoch_order(num_samples, seed, epoch)

    assert sorted(order) == list(range(num_samples))


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


# -- blends ---------------------------------------------------------------------------------


def numbered(first: int, samples: int, name: str) -> ArrayDataset:
    """Sample i has input `first` + i."""
    return ArrayDataset(torch.arange(first, first + samples), torch.zeros(samples, 1), name)


@settings(max_examples=30)
@given(weights=st.lists(st.floats(0.001, 1000), min_size=1, max_size=9))
def test_places_are_the_weights_shares(weights: list[float]) -> None:
    places = places_of(weights)

    assert sum(places) == BLOCK
    for place, weight in zip(places, weights, strict=True):
        assert abs(place - weight / sum(weights) * BLOCK) < 1


def test_every_block_has_each_source_as_often_as_its_weight_says_in_epochs_of_its_own() -> None:
    shares = [Share(7000, 6000), Share(500, 4000)]
    read = np.concatenate([blended_step(shares, 1000, step, 3) for step in range(20)], axis=1)

    for block in range(2):
        samples, epochs = read[:, block * BLOCK : (block + 1) * BLOCK]
        of_second = samples >= 7000
        assert of_second.sum() == 4000
        seen = Counter(zip(samples[of_second].tolist(), epochs[of_second].tolist(), strict=True))
        assert set(seen.values()) == {1}
        assert {epoch for _, epoch in seen} == set(range(block * 8, block * 8 + 8))
        # Sources alternate all along the block.
        assert 360 < of_second[:1000].sum() < 440
    first = read[:, read[0] < 7000]
    assert Counter(first[1].tolist()) == {0: 7000, 1: 5000}
    assert sorted(first[0][first[1] == 0].tolist()) == list(range(7000))


def test_the_order_of_a_blend_stays_what_it_was() -> None:
    samples, epochs = blended_step([Share(100, 7000), Share(9, 3000)], 8, 1251, 1234)

    assert samples.tolist() == [95, 72, 11, 99, 79, 102, 34, 62]
    assert epochs.tolist() == [119, 107, 137, 72, 105, 634, 85, 108]


def test_replicas_share_the_samples_of_a_blend_and_other_seeds_give_other_ones() -> None:
    blend = Blend([numbered(0, 40, "a"), numbered(100, 10, "b")], [0.75, 0.25])

    def read(replica: int, g_data: int, seed: int = 5) -> list[int]:
        batches = Batches(
            blend,
            num_samples=50,
            global_batch_size=12,
            microbatch_size=2,
            replica=replica,
            g_data=g_data,
            seed=seed,
            shares=blend.shares,
        )
        parts = batches.training(3).microbatches
        return [number for part in parts for number in part.inputs[0].tolist()]

    one = read(0, 1)
    assert read(0, 2) + read(1, 2) == one
    samples, _ = blended_step(blend.shares, 12, 3, 5)
    assert one == [sample if sample < 40 else sample + 60 for sample in samples]
    assert read(0, 1, seed=6) != one


@pytest.mark.parametrize("lengths", [[40, 10, 1], [3, 200], [1, 1, 1], [7]])
def test_evaluations_read_every_sample_once_and_all_sources_all_along(lengths: list[int]) -> None:
    shares = [Share(length, 1) for length in lengths]
    total, ends = sum(lengths), np.cumsum(lengths)

    order = interleaved(shares, np.arange(total))

    assert sorted(order) == [*range(total)]
    assert [*interleaved(shares, np.arange(total // 2, total))] == [*order[total // 2 :]]
    for length, end in zip(lengths, ends, strict=True):
        here = np.flatnonzero((order >= end - length) & (order < end))
        assert [*order[here]] == [*range(end - length, end)]
        before = np.searchsorted(here, np.arange(total))
        assert np.abs(before - np.arange(total) * length / total).max() < len(lengths)


def test_an_evaluation_batch_has_samples_of_all_sources() -> None:
    blend = Blend([numbered(0, 40, "a"), numbered(100, 10, "b")], [1, 1])
    batches = Batches(blend, num_samples=50, global_batch_size=10, microbatch_size=10, seed=5)

    [microbatch] = batches.evaluation(2).microbatches

    numbers = microbatch.inputs[0]
    assert len(numbers) == 10 and int((numbers >= 100).sum()) == 2


def test_a_blend_in_a_blend_divides_its_weight_among_its_data_sets() -> None:
    inner = Blend([numbered(0, 4, "a"), numbered(100, 6, "b")], [0.9, 0.1])

    blend = Blend([inner, numbered(200, 5, "c")], [1, 1])

    assert blend.name == "blend of a 45.00%, b 5.00%, c 50.00%"
    assert blend.shares == (Share(4, 4500), Share(6, 500), Share(5, 5000))
    (inputs,), _ = blend.read(np.array([0, 4, 10]))
    assert inputs.tolist() == [0, 100, 200]


def test_the_fingerprint_is_of_sources_and_weights() -> None:
    def fingerprint(weight: float, name: int = 0) -> str:
        return Blend([numbered(name, 4, "a"), numbered(9, 4, "b")], [weight, 1]).fingerprint

    assert fingerprint(1) == fingerprint(1.00001)
    assert len({fingerprint(1), fingerprint(2), fingerprint(1, 1)}) == 3


def test_targets_that_do_not_count_are_counted_out_whichever_source_has_them() -> None:
    plain = TokenDataset("a", "0", 8, np.arange(8, dtype=np.uint8), 3)
    marked = TokenDataset("b", "1", 8, np.arange(128, 136, dtype=np.uint8), 3, mark=128)
    blend = Blend([plain, marked], [1, 1])

    _, targets = blend.read(np.array([2, 0]))

    assert targets.tolist() == [[-100] * 3, [1, 2, 3]]
    assert blend.targets_per_sample is None
    assert blend.count_targets(targets) == 3
    assert blend.vocab_size == 8


@pytest.mark.parametrize("is_first", [True, False])
def test_the_targets_of_each_sample_count_by_the_rule_of_its_source(is_first: bool) -> None:
    words = torch.tensor([[0, 1], [0, 2], [3, 0]])
    rules = [ArrayDataset(words, words, "all"), ArrayDataset(words, words, "some", ignore_index=0)]
    blend = Blend(rules if is_first else rules[::-1], [1, 1])
    batches = Batches(blend, num_samples=6, global_batch_size=6, microbatch_size=4, seed=5)

    batch = batches.evaluation(0)

    assert [len(each.inputs[0]) for each in batch.microbatches] == [4, 2]
    assert batch.num_targets == 6 + 3
