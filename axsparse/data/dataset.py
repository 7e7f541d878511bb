"""What training needs of its data: samples by number. Token arrays, and tensors in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axsparse.runtime.errors import DataError

Tokens = NDArray[np.unsignedinteger[Any]]


class Samples(Protocol):
    """What is known of samples before any is read."""

    @property
    def name(self) -> str:
        """Shown on the screen."""
        ...

    @property
    def fingerprint(self) -> str:
        """Hex digest of the contents; ranks compare it at the start."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """Token ids are below this; None where samples are not tokens."""
        ...

    @property
    def targets_per_sample(self) -> int | None:
        """Targets of every sample; None where samples differ and `count_targets` decides."""
        ...

    def __len__(self) -> int:
        """Number of samples, at least 1."""
        ...

    def count_targets(self, targets: Tensor) -> int:
        """How many targets of a microbatch count in the loss (padding does not)."""
        ...


class Dataset(Samples, Protocol):
    """Samples by number; bring your own by giving a class these members.

    Batches are read ahead in a thread of their own, so `read` draws no random
    numbers and changes no state that others see.
    """

    def read(self, indices: NDArray[np.int64]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Inputs and targets of the samples with these numbers, in this order, batch first."""
        ...


@runtime_checkable
class PartedDataset(Samples, Protocol):
    """Samples whose inputs are dear: each end of the pipeline reads its own part only.

    Inputs may change from epoch to epoch, as long as they depend on nothing but sample
    and epoch. Two threads may read at once: one ahead of the steps, one for an evaluation.
    """

    def start(
        self, indices: NDArray[np.int64], epochs: NDArray[np.int64]
    ) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to read the inputs of these samples, each in its epoch, batch first.

        The call that is returned waits for them; it is made once, or never.
        """
        ...

    def targets(self, indices: NDArray[np.int64]) -> Tensor:
        """The targets of these samples, batch first."""
        ...

    def close(self) -> None:
        """Release what reading holds; a later `start` takes it again."""
        ...


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """Windows of `sequence_length` tokens, side by side, over one flat array of token ids.

    A target is the token after its input, so the last window needs one token more:
    N tokens make (N - 1) // sequence_length samples. `tokens` may be a memory map;
    only the windows asked for are read.
    """

    name: str
    fingerprint: str
    vocab_size: int
    tokens: Tokens
    """(N,) unsigned integers, all below `vocab_size`."""
    sequence_length: int

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.dtype.kind != "u":
            raise DataError(
                f"tokens ({self.name}): {self.tokens.ndim}-D array of {self.tokens.dtype}; "
                "token ids are one flat array of unsigned integers: flatten and convert it"
            )
        if not 1 <= self.sequence_length < self.tokens.size:
            raise DataError(
                f"sequence_length ({self.name}): {self.sequence_length} must be at least 1 and "
                f"less than the {self.tokens.size} tokens there are; change it or bring more data"
            )

    @property
    def targets_per_sample(self) -> int:
        return self.sequence_length

    def __len__(self) -> int:
        return (self.tokens.size - 1) // self.sequence_length

    def read(self, indices: NDArray[np.int64]) -> tuple[tuple[Tensor], Tensor]:
        """One (b, sequence_length) int64 input, and targets of the same shape and type."""
        at = indices[:, None] * self.sequence_length + np.arange(self.sequence_length)
        inputs, targets = (self.tokens[where].astype(np.int64) for where in (at, at + 1))
        return (torch.from_numpy(inputs),), torch.from_numpy(targets)

    def count_targets(self, targets: Tensor) -> int:
        return targets.numel()


class ArrayDataset:
    """Tensors in memory, whose first dimension numbers the samples; every target counts."""

    vocab_size = None

    def __init__(
        self, inputs: Tensor | tuple[Tensor, ...], targets: Tensor, name: str = "arrays"
    ) -> None:
        tensors = (*(inputs if isinstance(inputs, tuple) else (inputs,)), targets)
        # A 0-dimensional tensor has no first dimension: (), which equals no (n,).
        lengths = {tuple(tensor.shape[:1]) for tensor in tensors}
        if len(lengths) > 1 or not any(lengths.pop()):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise DataError(
                f"dataset ({name}): inputs and targets have shapes {shapes}; the first dimension "
                "numbers the samples: give all tensors the same, and at least one sample"
            )
        # Samples are leaves of every graph, even where a user's tensor asks for a gradient.
        *self._inputs, self._targets = (tensor.detach() for tensor in tensors)
        self.name = name
        self.fingerprint = _digest(tensors)
        self.targets_per_sample: int | None = targets[0].numel()

    def __len__(self) -> int:
        return len(self._targets)

    def read(self, indices: NDArray[np.int64]) -> tuple[tuple[Tensor, ...], Tensor]:
        """The rows of each input with these numbers, and those of the targets."""
        rows = torch.from_numpy(indices)
        return tuple(tensor[rows] for tensor in self._inputs), self._targets[rows]

    def count_targets(self, targets: Tensor) -> int:
        return targets.numel()


def _digest(tensors: tuple[Tensor, ...]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)} ".encode())
        # As bytes, since numpy knows no bfloat16.
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@dataclass(frozen=True)
class Datasets:
    """What is read, opened on the ranks that read only: an `ArrayDataset` or `TokenDataset`, or a
    class of one's own with the members of `Dataset`."""

    training: Dataset | PartedDataset
    validation: Dataset | PartedDataset | None = None
