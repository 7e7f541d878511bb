"""Several data sets as one, of which training reads each as often as its weight says."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axsparse.data.dataset import Dataset, length_of, read_tensors
from axsparse.data.order import BLOCK, Share, places_of
from axsparse.runtime.errors import DataError


class Blend:
    """Data sets that training reads in proportion to their weights: a `Dataset`.

    `weights` has one for each data set, in the same order; only their ratios matter, in steps of a
    ten-thousandth. Of every 10,000 samples that training reads, each data set gives its share, in
    an order that follows from the seed; each begins anew once all of its samples have been read
    (its epoch). An evaluation reads every sample of every data set once.

    All data sets read as many inputs and targets, of the same shapes. Raises DataError for weights
    that are not above zero, or too small for one sample in 10,000.
    """

    reads_epochs = True

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float]) -> None:
        if not datasets or len(datasets) != len(weights):
            raise DataError(
                f"blend: {len(datasets)} data sets have {len(weights)} weights; give one for each"
            )
        names = [dataset.name for dataset in datasets]
        for name, dataset in zip(names, datasets, strict=True):
            if not hasattr(dataset, "read"):
                raise DataError(f"blend: {name} has no read; give data sets with all members")
        for name, weight in zip(names, weights, strict=True):
            if not 0 < weight < float("inf"):
                raise DataError(f"blend: {name} has weight {weight}; choose one above 0")
        places = places_of(weights)
        for name, weight, count in zip(names, weights, places, strict=True):
            if not count:
                raise DataError(
                    f"blend: {name} has weight {weight} of {sum(weights):g}, which is not one "
                    f"sample in {BLOCK:,}; give it more, or leave it out"
                )
        lengths = [length_of(dataset, dataset.name) for dataset in datasets]
        self.datasets = tuple(datasets)
        self.shares = tuple(map(Share, lengths, places))
        """The length and place of each data set, by which training chooses the samples of a
        step."""
        self._ends = np.cumsum(lengths)
        percents = (
            f"{name} {count / BLOCK:.2%}" for name, count in zip(names, places, strict=True)
        )
        self.name = f"blend of {', '.join(percents)}"
        facts = [
            (one.fingerprint, *share) for one, share in zip(datasets, self.shares, strict=True)
        ]
        self.fingerprint = hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()
        vocabularies = [dataset.vocab_size or 0 for dataset in datasets]
        self.vocab_size = max(vocabularies) if all(vocabularies) else None
        counts = {dataset.targets_per_sample for dataset in datasets}
        self.targets_per_sample = counts.pop() if len(counts) == 1 else None
        # It matters here only whether all data sets say where documents begin.
        separators = [getattr(dataset, "separator", None) for dataset in datasets]
        self.separator = None if any(one is None for one in separators) else separators[0]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(
        self, indices: NDArray[np.int64], epochs: NDArray[np.int64] | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The inputs and targets of the samples with these numbers, which go through all data sets.

        Raises DataError if the data sets do not read alike.
        """
        epochs = np.zeros_like(indices) if epochs is None else epochs
        places, read = [], []
        for number, dataset in enumerate(self.datasets):
            first = int(self._ends[number]) - self.shares[number].samples
            here = np.flatnonzero((indices >= first) & (indices < self._ends[number]))
            if here.size:
                places.append(here)
                read.append(read_tensors(dataset, indices[here] - first, epochs[here]))
        back = torch.from_numpy(np.argsort(np.concatenate(places), kind="stable"))
        try:
            joined = [torch.cat(parts)[back] for parts in zip(*read, strict=True)]
        except (RuntimeError, ValueError, TypeError) as reason:
            raise DataError(
                f"data ({self.name}): its data sets read inputs or targets of different numbers or "
                "shapes; give data sets that read alike"
            ) from reason
        return tuple(joined[:-1]), joined[-1]

    def count_targets(self, targets: Tensor) -> int:
        """How many targets of a microbatch count in the loss, by the rule of the first data set."""
        return self.datasets[0].count_targets(targets)
