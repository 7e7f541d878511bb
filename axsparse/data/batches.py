"""A step's samples, divided among the replicas and cut into microbatches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from axsparse.data.dataset import Dataset, PartedDataset
from axsparse.data.order import epochs_of_step, samples_of_step
from axsparse.runtime.communication import shard_bounds
from axsparse.runtime.errors import DataError


@dataclass(frozen=True, eq=False)
class Microbatch:
    """Samples that pass through the pipeline together."""

    inputs: tuple[Tensor, ...]
    """Inputs of the first layer, batch first; empty where nothing is read."""
    targets: Tensor | None
    """What the loss compares the output with, batch first; None where nothing is read."""
    first_sample: int
    """Global position of the first sample: step × global_batch_size + its place in the
    batch. Keys random numbers, whatever the number of replicas."""
    size: int
    """Samples in it."""


@dataclass(frozen=True, eq=False)
class Batch:
    """One replica's part of a global batch."""

    step: int
    """Training step, or number of the evaluation batch."""
    microbatches: tuple[Microbatch, ...]
    """In global order; none where an evaluation batch has fewer microbatches than replicas."""
    num_targets: int
    """Targets that count in the loss, over this replica's microbatches."""


@dataclass(frozen=True)
class Batches:
    """Reads one replica's batches; any step at any time, since none depends on another.

    Without a dataset, on stages that read nothing, the microbatches are those of the
    stages that do, without tensors.
    """

    dataset: Dataset | PartedDataset | None
    _: KW_ONLY
    num_samples: int
    global_batch_size: int
    """A multiple of `g_data`."""
    microbatch_size: int
    replica: int
    g_data: int
    seed: int
    reads_inputs: bool = True
    """Of a dataset in parts, whether inputs are read: on the first stage they are."""
    reads_targets: bool = True
    """Likewise of targets, for the last stage."""
    pinned: bool = False
    """Whether tensors stand in memory that a GPU copies from without waiting."""

    def __post_init__(self) -> None:
        assert self.global_batch_size % self.g_data == 0, "replicas of unequal batch size"
        assert 0 <= self.replica < self.g_data, f"replica {self.replica} outside {self.g_data}"
        assert self.dataset is None or len(self.dataset) == self.num_samples

    @property
    def targets_per_sample(self) -> int | None:
        """Targets of every sample; None where samples differ, or nothing is read."""
        return None if self.dataset is None else self.dataset.targets_per_sample

    def training(self, step: int) -> Batch:
        """Shuffled samples, epoch after epoch: a pure function of (seed, step).

        A replica has a contiguous part of the batch; its last microbatch may be smaller.
        """
        size = self.global_batch_size
        shares = shard_bounds(size, self.g_data)
        begin, end = shares[self.replica], shares[self.replica + 1]
        return self._read(
            step,
            samples_of_step(self.num_samples, size, step, self.seed),
            epochs_of_step(self.num_samples, size, step),
            [*range(begin, end, self.microbatch_size), end],
        )

    @property
    def num_evaluation_batches(self) -> int:
        """Batches that see every sample once; the last may be smaller."""
        return -(-self.num_samples // self.global_batch_size)

    def evaluation(self, number: int) -> Batch:
        """Samples in their own order; `number` is in [0, num_evaluation_batches).

        Replicas share whole microbatches, so that each of these is the same in all layouts.
        """
        assert 0 <= number < self.num_evaluation_batches, f"no evaluation batch {number}"
        first = number * self.global_batch_size
        end = min(first + self.global_batch_size, self.num_samples)
        cuts = [*range(0, end - first, self.microbatch_size), end - first]
        shares = shard_bounds(len(cuts) - 1, self.g_data)
        own = cuts[shares[self.replica] : shares[self.replica + 1] + 1]
        samples = np.arange(first, end)
        return self._read(number, samples, np.zeros_like(samples), own)

    def close(self) -> None:
        """Release what the dataset holds for reading; reading again takes it again."""
        if isinstance(self.dataset, PartedDataset):
            self.dataset.close()

    def _read(
        self,
        step: int,
        samples: NDArray[np.int64],
        epochs: NDArray[np.int64],
        bounds: Sequence[int],
    ) -> Batch:
        """Microbatches of the samples between neighbouring bounds."""
        spans = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
        # All begun before the first is waited for, so that several processes may read at once.
        parts = [self._start(samples[span], epochs[span]) for span in spans]
        microbatches = []
        for span, part in zip(spans, parts, strict=True):
            inputs, targets = part()
            self._refuse_misread(inputs, targets, span.stop - span.start)
            if self.pinned:
                inputs = tuple(tensor.pin_memory() for tensor in inputs)
                targets = None if targets is None else targets.pin_memory()
            first_sample = step * self.global_batch_size + span.start
            size = span.stop - span.start
            microbatches.append(Microbatch(inputs, targets, first_sample, size))
        return Batch(step, tuple(microbatches), sum(map(self._count_targets, microbatches)))

    def _start(
        self, samples: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> Callable[[], tuple[tuple[Tensor, ...], Tensor | None]]:
        """Begin to read a microbatch; the call that is returned waits for it."""
        dataset = self.dataset
        if dataset is None:
            return lambda: ((), None)
        if not isinstance(dataset, PartedDataset):
            return lambda: dataset.read(samples)
        inputs = dataset.start(samples, epochs) if self.reads_inputs else lambda: ()
        return lambda: (inputs(), dataset.targets(samples) if self.reads_targets else None)

    def _refuse_misread(self, inputs: object, targets: object, size: int) -> None:
        """DataError for what a dataset of one's own reads and `Dataset.read` does not say."""
        if self.dataset is None:
            return
        if not isinstance(inputs, (tuple, list)):
            raise DataError(
                f"data ({self.dataset.name}): inputs are read as {type(inputs).__name__}; give a "
                "tuple of tensors"
            )
        for read in (*inputs, *([targets] if targets is not None else [])):
            if not isinstance(read, Tensor) or read.shape[:1] != (size,):
                shape = f" {tuple(read.shape)}" if isinstance(read, Tensor) else ""
                raise DataError(
                    f"data ({self.dataset.name}): {size} samples are read as "
                    f"{type(read).__name__}{shape}; give tensors, samples first"
                )

    def _count_targets(self, microbatch: Microbatch) -> int:
        if self.dataset is None or microbatch.targets is None:
            return 0
        if self.dataset.targets_per_sample is None:
            return self.dataset.count_targets(microbatch.targets)
        return self.dataset.targets_per_sample * microbatch.size
