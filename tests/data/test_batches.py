"""Data sets, and how a step's samples are divided into microbatches."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import chain
from types import FrameType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.runs import summed_loss, tiny_config, train_in_process
from torch import Tensor, nn

from axsparse.data.batches import AHEAD, Batch, Batches, Prefetcher
from axsparse.data.dataset import ArrayDataset, Dataset, TokenDataset
from axsparse.data.order import samples_of_step
from axsparse.data.sources import Blend
from axsparse.models.sequential import from_sequential


def numbered(num_samples: int) -> ArrayDataset:
    """Sample i has input i and two targets."""
    return ArrayDataset(torch.arange(num_samples), torch.zeros(num_samples, 2))


def batches(
    dataset: Dataset | None,
    *,
    num_samples: int | None = None,
    global_batch_size: int = 12,
    microbatch_size: int = 2,
    replica: int = 0,
    g_data: int = 1,
) -> Batches:
    if num_samples is None:
        assert dataset is not None
        num_samples = len(dataset)
    return Batches(
        dataset,
        num_samples=num_samples,
        global_batch_size=global_batch_size,
        microbatch_size=microbatch_size,
        replica=replica,
        g_data=g_data,
        seed=7,
    )


def samples(batch: Batch) -> list[list[int]]:
    return [microbatch.inputs[0].tolist() for microbatch in batch.microbatches]


def flat(batch: Batch) -> list[int]:
    return [sample for microbatch in samples(batch) for sample in microbatch]


class Padded:
    """Sample i has i targets, the rest of its row is padding."""

    name, fingerprint = "padded", ""
    vocab_size = targets_per_sample = None

    def __len__(self) -> int:
        return 9

    def read(self, indices: NDArray[np.int64]) -> tuple[tuple[Tensor, ...], Tensor]:
        numbers = torch.from_numpy(indices)
        return (numbers,), (torch.arange(8) < numbers[:, None]).long() - 1

    def count_targets(self, targets: Tensor) -> int:
        return int((targets >= 0).sum())


# -- Data sets


def test_each_token_says_where_in_its_sample_its_document_begins() -> None:
    text = np.array([5, 6, 0, 7, 0, 0, 8, 9, 1, 2, 0, 3, 4], np.uint8)

    (tokens, starts), targets = TokenDataset("t", "0", 10, text, 6, separator=0).read(
        np.array([0, 1])
    )

    assert tokens.tolist() == [[5, 6, 0, 7, 0, 0], [8, 9, 1, 2, 0, 3]]
    assert starts.tolist() == [[0, 0, 0, 3, 3, 5], [0, 0, 0, 0, 0, 5]]
    assert starts.dtype == torch.int32
    assert targets.tolist() == [[6, 0, 7, 0, 0, 8], [9, 1, 2, 0, 3, 4]]


def test_tensors_in_memory_are_a_data_set() -> None:
    images, lengths = torch.rand(5, 3, 4, requires_grad=True), torch.arange(5)
    targets = torch.arange(10).reshape(5, 2)
    dataset: Dataset = ArrayDataset((images, lengths), targets, name="mine")

    inputs, read_targets = dataset.read(np.array([4, 1]))

    assert torch.equal(inputs[0], images[[4, 1]].detach())
    assert not inputs[0].requires_grad
    assert inputs[1].tolist() == [4, 1]
    assert read_targets.tolist() == [[8, 9], [2, 3]]
    assert (len(dataset), dataset.name, dataset.vocab_size) == (5, "mine", None)
    assert dataset.targets_per_sample == 2
    assert dataset.count_targets(read_targets) == 4


X = torch.randn(24, 16, generator=torch.Generator().manual_seed(1))
Y = torch.arange(24) % 5
CONFIG = tiny_config(
    batch={"global_batch_size": 24, "microbatch_size": 6},
    train={"steps": 1, "eval_every": 1, "eval_steps": "all"},
    pruning={"sparsity": 0.0},
)


@pytest.mark.parametrize("layout", [(1, 1), (1, 2), (2, 1)])
def test_the_mean_loss_is_over_the_targets_that_the_loss_counts(layout: tuple[int, int]) -> None:
    """-100 is what cross entropy leaves out, in training and in evaluations."""
    targets = Y.clone()
    targets[::3] = -100
    torch.manual_seed(1)
    modules = nn.Sequential(nn.Linear(16, 5))
    with torch.no_grad():
        expected = F.cross_entropy(modules(X), targets).item()
    data = ArrayDataset(X, targets)

    _, trace = train_in_process(
        *layout, from_sequential([*modules, nn.Identity()], summed_loss), CONFIG, data
    )[-1]

    assert data.targets_per_sample is None
    assert trace.losses[0] == pytest.approx(expected, rel=1e-5)


def test_where_minus_100_is_a_number_like_any_other_it_counts() -> None:
    targets = torch.tensor([-100, 3, 4])

    whole = ArrayDataset(targets, targets, ignore_index=None)
    other = ArrayDataset(targets, targets, ignore_index=3)
    real = ArrayDataset(targets, targets.float())

    assert (whole.targets_per_sample, real.targets_per_sample) == (1, 1)
    assert [each.count_targets(targets) for each in (whole, other)] == [3, 2]
    assert real.count_targets(targets.float()) == 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int64, torch.bool])
def test_a_number_beyond_the_type_of_targets_leaves_none_out(dtype: torch.dtype) -> None:
    """In torch -100 is 156 in a comparison with uint8, and 156 is -100 in one with int8."""
    targets = torch.tensor([156, 3, 4]).to(dtype)

    assert ArrayDataset(targets, targets).count_targets(targets) == (
        2 if dtype == torch.int8 else 3
    )
    assert ArrayDataset(targets, targets, ignore_index=412).targets_per_sample == 1


def test_tokens_of_one_byte_are_words_of_a_larger_vocabulary() -> None:
    tokens = torch.tensor([[5, 200]], dtype=torch.uint8)

    batch = replace(batches(ArrayDataset(tokens, tokens)), vocab_size=300).training(0)

    assert torch.equal(batch.microbatches[0].inputs[0][:1], tokens)


# -- Batches


@pytest.mark.parametrize("g_data", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("microbatch_size", [1, 2, 5, 100])
def test_replicas_share_a_steps_samples_in_order_and_microbatches_know_their_places(
    g_data: int, microbatch_size: int
) -> None:
    replicas = [
        batches(
            numbered(50), microbatch_size=microbatch_size, replica=replica, g_data=g_data
        ).training(9)
        for replica in range(g_data)
    ]

    expected = samples_of_step(50, 12, 9, seed=7).tolist()
    assert [*chain(*map(flat, replicas))] == expected
    microbatches = [*chain(*(batch.microbatches for batch in replicas))]
    assert {microbatch.size for microbatch in microbatches[:-1]} <= {microbatch_size}
    for microbatch in microbatches:
        first = microbatch.first_sample - 9 * 12
        assert microbatch.inputs[0].tolist() == expected[first : first + microbatch.size]
    # Replicas have whole microbatches, some one more than others.
    shares = {len(batch.microbatches) for batch in replicas}
    assert shares == {len(microbatches) // g_data, -(-len(microbatches) // g_data)}
    assert {batch.step for batch in replicas} == {9}


def test_targets_are_counted_by_the_data_set_where_they_are_not() -> None:
    batch = batches(Padded(), microbatch_size=2, g_data=3, replica=2, global_batch_size=9)

    assert batch.evaluation(0).num_targets == 6 + 7 + 8


@given(
    num_samples=st.integers(1, 60),
    samples_of_replica=st.integers(1, 8),
    g_data=st.integers(1, 5),
    microbatch_size=st.integers(1, 9),
)
def test_evaluation_sees_every_sample_once_in_its_own_order(
    num_samples: int, samples_of_replica: int, g_data: int, microbatch_size: int
) -> None:
    replicas = [
        batches(
            numbered(num_samples),
            global_batch_size=samples_of_replica * g_data,
            microbatch_size=microbatch_size,
            replica=replica,
            g_data=g_data,
        )
        for replica in range(g_data)
    ]

    seen: list[int] = []
    for number in range(replicas[0].num_evaluation_batches):
        parts = [replica.evaluation(number) for replica in replicas]
        shares = [len(part.microbatches) for part in parts]
        assert max(shares) - min(shares) <= 1
        assert [part.num_targets for part in parts] == [2 * len(flat(part)) for part in parts]
        for part in parts:
            assert part.step == number
            assert [m.first_sample for m in part.microbatches] == [s[0] for s in samples(part)]
            seen += flat(part)
        sizes = [m.size for part in parts for m in part.microbatches]
        assert all(size == microbatch_size for size in sizes[:-1])

    assert seen == list(range(num_samples))


class Dated:
    """A data set whose inputs are (number, epoch) of each sample."""

    name, fingerprint = "dated", ""
    vocab_size, targets_per_sample = None, 1
    reads_epochs = True

    def __len__(self) -> int:
        return 10

    def read(
        self, indices: NDArray[np.int64], epochs: NDArray[np.int64] | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        pairs = np.stack([indices, np.zeros_like(indices) if epochs is None else epochs], axis=1)
        return (torch.from_numpy(pairs),), torch.from_numpy(indices)

    def count_targets(self, targets: Tensor) -> int:
        return targets.numel()


def test_a_sample_knows_its_epoch_in_training_and_has_none_in_evaluation() -> None:
    reader = batches(Dated(), global_batch_size=8, g_data=2)
    seen = [
        tuple(row)
        for step in range(5)  # 40 samples, of which this replica has half
        for microbatch in reader.training(step).microbatches
        for row in microbatch.inputs[0].tolist()
    ]
    evaluated = reader.evaluation(0)

    # Steps 0 to 4 begin at positions 0, 8, 16, 24 and 32; an epoch has ten samples.
    assert [epoch for _, epoch in seen] == [0] * 4 + [0] * 2 + [1] * 2 + [1] * 4 + [2] * 4 + [3] * 4
    assert len(set(seen)) == 20
    assert [m.inputs[0][:, 1].tolist() for m in evaluated.microbatches] == [[0, 0], [0, 0]]


def test_sources_of_a_blend_that_read_epochs_get_their_own() -> None:
    blend = Blend([Dated(), Dated()], [1, 1])

    (inputs,), _ = blend.read(np.array([14, 0, 16, 3]), np.array([7, 0, 8, 1]))

    assert inputs.tolist() == [[4, 7], [0, 0], [6, 8], [3, 1]]
    assert (len(blend), blend.targets_per_sample, blend.vocab_size) == (20, 1, None)
    assert blend.name == "blend of dated 50.00%, dated 50.00%"


def test_a_stage_that_reads_nothing_has_the_same_microbatches_without_tensors() -> None:
    reader = batches(numbered(17), replica=1, g_data=2, microbatch_size=4)
    other = batches(None, num_samples=17, replica=1, g_data=2, microbatch_size=4)

    assert other.num_evaluation_batches == reader.num_evaluation_batches
    assert (other.targets_per_sample, reader.targets_per_sample) == (None, 2)
    for batch, expected in (
        (other.training(3), reader.training(3)),
        (other.evaluation(1), reader.evaluation(1)),
    ):
        assert [(m.first_sample, m.size) for m in batch.microbatches] == [
            (m.first_sample, m.size) for m in expected.microbatches
        ]
        assert {(m.inputs, m.targets) for m in batch.microbatches} == {((), None)}
        assert batch.num_targets == 0


PATIENCE = 30
"""Seconds after which a test gives up on a hanging thread; passing tests take far less."""


def read(step: int) -> Batch:
    return Batch(step, microbatches=(), num_targets=0)


@pytest.fixture(autouse=True)
def _no_test_hangs_and_no_thread_is_left() -> Iterator[None]:
    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still waiting after {PATIENCE} seconds")

    before = threading.enumerate()
    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    assert threading.enumerate() == before


def test_batches_come_in_order_and_so_many_are_read_ahead() -> None:
    asked_for = 0
    leads: list[int] = []
    far_ahead = threading.Event()

    def read_and_note(step: int) -> Batch:
        leads.append(step - asked_for)
        if step == AHEAD - 1:
            far_ahead.set()
        return read(step)

    with closing(Prefetcher(read_and_note, first_step=0)) as prefetcher:
        far_ahead.wait()
        for step in range(200):
            asked_for = step + 1
            assert prefetcher.get(step).step == step

    assert max(leads) == AHEAD - 1


def test_with_an_end_it_reads_no_further() -> None:
    steps: list[int] = []

    def read_and_note(step: int) -> Batch:
        steps.append(step)
        return read(step)

    with closing(Prefetcher(read_and_note, first_step=2, end=5)) as prefetcher:
        got = [prefetcher.get(step).step for step in (2, 3, 4)]
        with pytest.raises(AssertionError, match="step 5 is the end"):
            prefetcher.get(5)

    assert got == steps == [2, 3, 4]


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_what_read_raises_comes_out_of_get_at_its_step(kind: type[BaseException]) -> None:
    error = kind("disk gone")

    def read_twice(step: int) -> Batch:
        if step == 2:
            raise error
        return read(step)

    with closing(Prefetcher(read_twice, first_step=0)) as prefetcher:
        assert [prefetcher.get(step).step for step in (0, 1)] == [0, 1]
        with pytest.raises(kind) as caught:
            prefetcher.get(2)

    assert caught.value is error


def test_closing_waits_for_the_read_under_way() -> None:
    reading, may_end = threading.Event(), threading.Event()

    def read_slowly(step: int) -> Batch:
        reading.set()
        may_end.wait()
        return read(step)

    prefetcher = Prefetcher(read_slowly, first_step=0)
    reading.wait()
    threading.Thread(target=may_end.set).start()

    prefetcher.close()
    prefetcher.close()

    with pytest.raises(AssertionError, match="closed"):
        prefetcher.get(0)
