"""The batches of training and evaluation, divided among replicas and cut into microbatches.

A thread reads them ahead of the steps that need them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from axsparse.data.dataset import Dataset, read_tensors
from axsparse.data.order import Share, blended_step, interleaved, samples_of_step
from axsparse.data.sources import Blend
from axsparse.runtime.communication import shard_bounds
from axsparse.runtime.errors import DataError
from axsparse.runtime.targets import IGNORED


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Samples that pass through the pipeline together.

    Tensors have the samples as their first dimension.
    """

    inputs: tuple[Tensor, ...]
    """Of the first layer; empty on a stage that reads no inputs."""
    targets: Tensor | None
    """None on a stage that reads no targets."""
    first_sample: int
    """Global position of the first sample: step × global_batch_size + its place in the global
    batch. Random numbers are keyed by it, so that they do not depend on the layout."""
    size: int
    num_targets: int = 0
    """Number of targets that count in the loss; 0 where none are read."""
    numbers: Sequence[int] = ()
    """Which samples of the data set they are."""


@dataclass(frozen=True, eq=False)
class Batch:
    """The part of a global batch that one replica computes."""

    step: int
    """The training step, or the number of the evaluation batch."""
    microbatches: tuple[Microbatch, ...]
    """In global order. May be empty: an evaluation batch may have fewer microbatches than there
    are replicas."""
    num_targets: int
    """Number of targets in `microbatches` that count in the loss; 0 on a stage that reads none."""


@dataclass(frozen=True)
class Batches:
    """Reads the batches of one replica, for any step and in any order of steps.

    Stages that read nothing have no dataset: their batches consist of the same microbatches as on
    the stages that read, without tensors.
    """

    dataset: Dataset | None
    _: KW_ONLY
    num_samples: int
    global_batch_size: int
    """Samples of a step, all replicas together."""
    microbatch_size: int
    seed: int
    replica: int = 0
    g_data: int = 1
    vocab_size: int | None = None
    """The vocabulary of the model: tokens are below it, and below the dataset's. None if the model
    has none."""
    shares: tuple[Share, ...] = ()
    """The sources of the training data, if it is a blend."""
    pinned: bool = False
    """Whether tensors are moved to pinned memory, from which a GPU copies asynchronously."""

    def __post_init__(self) -> None:
        assert 0 <= self.replica < self.g_data, f"replica {self.replica} outside {self.g_data}"

    @property
    def targets_per_sample(self) -> int | None:
        """`Dataset.targets_per_sample` of the dataset; None on a stage that reads nothing."""
        return None if self.dataset is None else self.dataset.targets_per_sample

    def training(self, step: int) -> Batch:
        """The batch of a training step, a pure function of (seed, step); each epoch is shuffled."""
        size = self.global_batch_size
        if self.shares:
            return self._read(step, *blended_step(self.shares, size, step, self.seed))
        epochs = (step * size + np.arange(size)) // self.num_samples
        return self._read(step, samples_of_step(self.num_samples, size, step, self.seed), epochs)

    def first(self, samples: int) -> tuple[Microbatch, ...]:
        """The first samples of training, in its order; the same for every replica."""
        return self.alone(samples).training(0).microbatches

    def alone(self, samples: int) -> Batches:
        """Batches of this many samples, all of which every replica reads."""
        return replace(self, global_batch_size=samples, replica=0, g_data=1)

    @property
    def num_evaluation_batches(self) -> int:
        """Batches that contain every sample once; the last one may be smaller."""
        return -(-self.num_samples // self.global_batch_size)

    def evaluation(self, number: int) -> Batch:
        """An evaluation batch, unshuffled, to which the sources of a blend give in proportion to
        their lengths; `number` is in [0, num_evaluation_batches)."""
        assert 0 <= number < self.num_evaluation_batches, f"no evaluation batch {number}"
        first = number * self.global_batch_size
        samples = np.arange(first, min(first + self.global_batch_size, self.num_samples))
        if isinstance(self.dataset, Blend):
            samples = interleaved(self.dataset.shares, samples)
        return self._read(number, samples, np.zeros_like(samples))

    def _read(self, step: int, samples: NDArray[np.int64], epochs: NDArray[np.int64]) -> Batch:
        """This replica's part of a global batch.

        The batch is cut into microbatches first, and replicas take entire ones, so that every
        microbatch is the same in all layouts.
        """
        cuts = [*range(0, len(samples), self.microbatch_size), len(samples)]
        shares = shard_bounds(len(cuts) - 1, self.g_data)
        own = cuts[shares[self.replica] : shares[self.replica + 1] + 1]
        microbatches = []
        for span in itertools.starmap(slice, itertools.pairwise(own)):
            inputs, targets = self._plain(samples[span], epochs[span])
            count = 0 if targets is None else self._count_targets(targets, samples[span])
            if self.pinned:
                inputs = tuple(tensor.pin_memory() for tensor in inputs)
                targets = None if targets is None else targets.pin_memory()
            first_sample, size = step * self.global_batch_size + span.start, span.stop - span.start
            numbers = samples[span].tolist()
            microbatches.append(Microbatch(inputs, targets, first_sample, size, count, numbers))
        return Batch(step, tuple(microbatches), sum(one.num_targets for one in microbatches))

    def _plain(
        self, samples: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> tuple[tuple[Tensor, ...], Tensor | None]:
        if self.dataset is None:
            return (), None
        # Tensors of torch.inference_mode cannot be saved for a backward; a copy can.
        plain = [
            read.clone() if read.is_inference() else read.detach()
            for read in read_tensors(self.dataset, samples, epochs)
        ]
        self._reject_foreign(plain[0], samples)
        if self.dataset.vocab_size is not None:  # else targets are no tokens
            self._reject_foreign(plain[-1], samples, ignored=IGNORED)
        return tuple(plain[:-1]), plain[-1]

    def _reject_foreign(
        self, tokens: Tensor, samples: NDArray[np.int64], ignored: int | None = None
    ) -> None:
        """DataError for the first token that is beyond the vocabulary, and not `ignored`."""
        assert self.dataset is not None
        sizes = [size for size in (self.vocab_size, self.dataset.vocab_size) if size is not None]
        if tokens.is_floating_point() and self.vocab_size is not None and ignored is None:
            raise DataError(
                f"data ({self.dataset.name}): inputs are {tokens.dtype}, and the model takes token "
                "ids; give whole numbers, as tensor.long() makes them"
            )
        if not sizes or tokens.is_floating_point():
            return
        words = min(sizes)
        flat = tokens.reshape(-1).long()  # bounds beyond a smaller type become other numbers in it
        is_foreign = (flat < 0) | (flat >= words)
        if ignored is not None:
            is_foreign &= flat != ignored
        if not is_foreign.any():
            return
        first = int(is_foreign.int().argmax())
        sample, position = divmod(first, flat.numel() // len(tokens))
        raise DataError(
            f"data ({self.dataset.name}): sample {samples[sample]}, position {position}: "
            f"{int(flat[first])} is no word of a vocabulary of {words}, 0 to {words - 1}; correct "
            "the sample, or make the vocabulary of model and data larger"
        )

    def _count_targets(self, targets: Tensor, samples: NDArray[np.int64]) -> int:
        dataset = self.dataset
        assert dataset is not None
        if dataset.targets_per_sample is not None:
            return dataset.targets_per_sample * len(samples)
        if isinstance(dataset, Blend):
            count = dataset.count_targets(targets, samples)
        else:
            count = dataset.count_targets(targets)
        return integer_of(count, f"{dataset.name}: count_targets")


def integer_of(count: object, what: str, least: int = 0) -> int:
    """A number of targets, by which losses are divided; DataError for anything else."""
    try:
        whole: int = int(count)  # type: ignore[call-overload]  # the error says what it rejects
        if whole == count and whole >= least:
            return whole
    except (TypeError, ValueError, OverflowError):
        pass
    raise DataError(f"data: {what} is {count!r}; it must be a whole number, at least {least}")


AHEAD = 3
"""Batches that are read or wait in memory, in addition to the one requested last."""


class Prefetcher:
    """The batches of consecutive steps, read ahead by a thread.

    With an `end`, only the steps below it are read. The thread lives until `close`.
    """

    def __init__(
        self, read: Callable[[int], Batch], first_step: int, end: int | None = None
    ) -> None:
        self._read = read
        self._next_step = first_step
        self._end = end
        self._coming: deque[Callable[[], Batch]] = deque()
        self._thread = ThreadPoolExecutor(1, "axsparse-prefetch")
        self._read_ahead()

    def get(self, step: int) -> Batch:
        """The batch of a step, waited for if necessary; steps must be requested in order.

        If `read` raised an exception for this step, the same object is raised here.
        """
        assert step == self._next_step, f"step {step} asked for, {self._next_step} comes next"
        assert self._coming, f"closed, or step {step} is the end"
        batch = self._coming.popleft()()
        self._next_step += 1
        self._read_ahead()
        return batch

    def close(self) -> None:
        """End the thread, after the read that it is busy with; safe to call twice."""
        self._coming.clear()
        self._thread.shutdown(cancel_futures=True)

    def _read_ahead(self) -> None:
        while len(self._coming) < AHEAD:
            step = self._next_step + len(self._coming)
            if self._end is not None and step >= self._end:
                return
            self._coming.append(self._reading(step))

    def _reading(self, step: int) -> Callable[[], Batch]:
        try:
            return self._thread.submit(self._read, step).result
        except RuntimeError:  # at the program's exit, where a run that was left is closed
            return partial(self._read, step)
