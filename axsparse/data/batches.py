"""A step's samples, divided among the replicas and cut into microbatches."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from axsparse.comm import shard_bounds
from axsparse.data.dataset import Dataset
from axsparse.data.order import samples_of_step


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
    """In global order; none where an evaluation batch has fewer samples than replicas."""
    num_targets: int
    """Targets that count in the loss, over this replica's microbatches."""


@dataclass(frozen=True)
class Batches:
    """Reads one replica's batches; any step at any time, since none depends on another.

    Without a dataset, on stages that read nothing, the microbatches are those of the
    stages that do, without tensors.
    """

    dataset: Dataset | None
    _: KW_ONLY
    num_samples: int
    global_batch_size: int
    """A multiple of `g_data`."""
    microbatch_size: int
    replica: int
    g_data: int
    seed: int

    def __post_init__(self) -> None:
        assert self.global_batch_size % self.g_data == 0, "replicas of unequal batch size"
        assert 0 <= self.replica < self.g_data, f"replica {self.replica} outside {self.g_data}"
        assert self.dataset is None or len(self.dataset) == self.num_samples

    @property
    def targets_per_sample(self) -> int | None:
        """Targets of every sample; None where samples differ, or nothing is read."""
        return None if self.dataset is None else self.dataset.targets_per_sample

    def training(self, step: int) -> Batch:
        """Shuffled samples, epoch after epoch: a pure function of (seed, step)."""
        samples = samples_of_step(self.num_samples, self.global_batch_size, step, self.seed)
        return self._read(step, samples)

    @property
    def num_evaluation_batches(self) -> int:
        """Batches that see every sample once; the last may be smaller."""
        return -(-self.num_samples // self.global_batch_size)

    def evaluation(self, number: int) -> Batch:
        """Samples in their own order; `number` is in [0, num_evaluation_batches)."""
        assert 0 <= number < self.num_evaluation_batches, f"no evaluation batch {number}"
        first = number * self.global_batch_size
        end = min(first + self.global_batch_size, self.num_samples)
        return self._read(number, np.arange(first, end))

    def _read(self, step: int, samples: NDArray[np.int64]) -> Batch:
        """This replica's contiguous part of a global batch; the last microbatch may be smaller."""
        bounds = shard_bounds(len(samples), self.g_data)
        begin, end = bounds[self.replica], bounds[self.replica + 1]
        microbatches = tuple(
            self._read_microbatch(
                samples[offset : min(offset + self.microbatch_size, end)],
                first_sample=step * self.global_batch_size + offset,
            )
            for offset in range(begin, end, self.microbatch_size)
        )
        return Batch(step, microbatches, sum(map(self._count_targets, microbatches)))

    def _read_microbatch(self, samples: NDArray[np.int64], first_sample: int) -> Microbatch:
        if self.dataset is None:
            return Microbatch((), None, first_sample, size=len(samples))
        inputs, targets = self.dataset.read(samples)
        return Microbatch(inputs, targets, first_sample, size=len(samples))

    def _count_targets(self, microbatch: Microbatch) -> int:
        if self.dataset is None or microbatch.targets is None:
            return 0
        if self.dataset.targets_per_sample is None:
            return self.dataset.count_targets(microbatch.targets)
        return self.dataset.targets_per_sample * microbatch.size
