"""Data sets: the protocol that training reads samples by, and two implementations.

A sample is known by its number, from 0 to the number of samples.
`ArrayDataset` holds tensors in memory, `TokenDataset` cuts samples out of an array of tokens.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axsparse.runtime.canonical_form import digest_of
from axsparse.runtime.errors import DataError, check_kind, check_kinds
from axsparse.runtime.files.run_folder import RESUME_AUTO
from axsparse.runtime.targets import IGNORED

Tokens = NDArray[np.unsignedinteger[Any]]


class Dataset(Protocol):
    """Samples that are read by their numbers, inputs and targets together.

    To bring custom data, write a class with these members, for example:

        class Sines:
            name, fingerprint = "sines", "sines, version 1"
            vocab_size, targets_per_sample = None, 1

            def __len__(self):
                return 10_000

            def read(self, indices):
                x = torch.from_numpy(indices / 100.0).float().unsqueeze(1)
                return (x,), torch.sin(x)

            def count_targets(self, targets):
                return targets.numel()

    The first and the last stage of every replica open the data and read it. Batches are read
    ahead of the steps in a thread, and an evaluation may read at the same time: therefore
    `read` is a pure function of the sample numbers, draws no random numbers, and changes
    nothing that others see.

    Samples that are augmented differ from epoch to epoch. A class with `reads_epochs = True` has
    `read(indices, epochs)` instead: `epochs` is (b,), the epoch that each sample belongs to (0 in
    evaluations), and `read` draws from a generator that is keyed by epoch and sample. `from_torch`
    makes such a data set of one for torch.
    """

    @property
    def name(self) -> str:
        """The name that the banner and error messages show."""
        ...

    @property
    def fingerprint(self) -> str:
        """A hex digest of the contents, the same on all ranks that read, as is checked at the start
        of a run."""
        ...

    @property
    def vocab_size(self) -> int | None:
        """All token ids are below this number; None if samples are not tokens."""
        ...

    @property
    def targets_per_sample(self) -> int | None:
        """How many targets of every sample count in the loss; None if samples differ in this: then
        `count_targets` is asked for each microbatch."""
        ...

    def __len__(self) -> int:
        """Number of samples, at least 1."""
        ...

    def count_targets(self, targets: Tensor) -> int:
        """How many of these targets of one microbatch count in the loss; padding does not. The loss
        of a step is divided by the sum over all its microbatches."""
        ...

    def read(self, indices: NDArray[np.int64]) -> tuple[tuple[Tensor, ...], Tensor]:
        """The inputs and the targets of the samples with these numbers, in this order.

        `indices` is (b,), with values in [0, len(self)). Every tensor that is returned, each
        input of the first layer and the targets, is dense and real, has b as its first dimension
        and lies in CPU memory; others are refused with a DataError. Whatever `read` raises ends
        the run: raise DataError for samples that cannot be read.
        """
        ...


@dataclass(frozen=True)
class Datasets:
    """The data of a run, as a function that `ax.Trainer(data=…)` is given returns it on ranks
    that read."""

    training: Dataset
    validation: Dataset | None = None
    """The data of evaluations; None if the run has none."""


class ArrayDataset:
    """Tensors in memory whose first dimension numbers the samples: a `Dataset`.

    Every target counts in the loss, except integers that are `ignore_index`, which cross entropy
    leaves out; with None these count as well. Raises DataError for what is no tensor, and if the
    tensors differ in their number of samples, or have none.
    """

    vocab_size = None

    def __init__(
        self,
        inputs: Tensor | tuple[Tensor, ...],
        targets: Tensor,
        name: str = "arrays",
        *,
        ignore_index: int | None = IGNORED,
    ) -> None:
        tensors = (*(inputs if isinstance(inputs, tuple) else (inputs,)), targets)
        given: Any
        for given in tensors:
            if not isinstance(given, Tensor):
                raise DataError(
                    f"dataset ({name}): inputs and targets are tensors, not "
                    f"{type(given).__name__}; make a tensor of it by torch.as_tensor, of a table "
                    "by its to_numpy() first, of a list of tensors by torch.stack (or a tuple of "
                    "several inputs)"
                )
            if given.layout != torch.strided or given.is_nested or given.is_meta:
                kind = "nested" if given.is_nested else str(given.layout).removeprefix("torch.")
                raise DataError(
                    f"dataset ({name}): a tensor is {kind} on {given.device}; give dense tensors "
                    "of real numbers in CPU memory, samples first"
                )
        check_kinds("dataset", locals(), name="text", ignore_index="whole number or None")
        # A 0-dimensional tensor has no first dimension: its () differs from every (n,).
        lengths = {tuple(tensor.shape[:1]) for tensor in tensors}
        if len(lengths) > 1 or not any(lengths.pop()):
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise DataError(
                f"dataset ({name}): inputs and targets have shapes {shapes}; the first dimension "
                "numbers the samples: give all tensors the same, and at least one sample"
            )
        # No gradient flows into the samples, even if a given tensor requires one.
        *self._inputs, self._targets = (tensor.detach() for tensor in tensors)
        self.name = name
        self.fingerprint = digest_of(enumerate(tensors))
        self.ignore_index = ignore_index
        has_gaps = counted(targets, ignore_index) < targets.numel()
        self.targets_per_sample: int | None = None if has_gaps else targets[0].numel()

    def __len__(self) -> int:
        return len(self._targets)

    def read(self, indices: NDArray[np.int64]) -> tuple[tuple[Tensor, ...], Tensor]:
        """The rows with these numbers, of every input and of the targets."""
        rows = torch.from_numpy(indices)
        return tuple(tensor[rows] for tensor in self._inputs), self._targets[rows]

    def count_targets(self, targets: Tensor) -> int:
        return counted(targets, self.ignore_index)


@dataclass(frozen=True, eq=False)
class TokenDataset:
    """Adjacent windows of `sequence_length` tokens in one flat array of token ids: a `Dataset`.

    The target of a token is the token after it, so that the last window needs one token more:
    N tokens make (N - 1) // sequence_length samples. `tokens` may be a memory map, of which
    only the requested windows are read. Raises DataError for an array of another kind, or
    one that is too short for a single sample.
    """

    name: str
    fingerprint: str
    vocab_size: int
    tokens: Tokens
    """(N,) unsigned integers, all below `vocab_size`."""
    sequence_length: int
    separator: int | NDArray[np.int64] | None = None
    """The id that ends each document, or the places at which documents begin, (D,) and ascending
    from 0. With it, samples have a second input, which says where in the sample the document of
    each token begins."""
    mark: int = 0
    """The bit that is set in tokens that do not count as targets; 0 if all of them count."""

    def __post_init__(self) -> None:
        numbers = dict.fromkeys(("vocab_size", "sequence_length", "mark"), "whole number")
        check_kinds("tokens", vars(self), name="text", fingerprint="text", **numbers)
        if not isinstance(getattr(self.tokens, "dtype", None), np.dtype):
            check_kind("tokens", self.tokens, np.ndarray, "give an array of numpy")
        kinds = int | np.integer | np.ndarray | None
        way = "give a whole number or an array of numpy"
        check_kind("tokens: separator", self.separator, kinds, way)
        if self.tokens.ndim != 1 or self.tokens.dtype.kind != "u":
            raise DataError(
                f"tokens ({self.name}): {self.tokens.ndim}-D array of {self.tokens.dtype}; "
                "token ids are one flat array of unsigned integers: flatten and convert it"
            )
        begins = self.separator
        if isinstance(begins, np.ndarray) and (
            begins.ndim != 1
            or begins.dtype.kind not in "iu"
            or begins[:1].tolist() != [0]
            or (begins[1:] < begins[:-1]).any()
        ):
            raise DataError(
                f"tokens ({self.name}): separator is {begins.ndim}-D, of {begins.dtype}, and "
                f"begins with {begins.reshape(-1)[:3].tolist()}; give the places at which "
                "documents begin, whole numbers that ascend from 0 (of their ends, "
                "np.r_[0, ends[:-1]])"
            )
        size = self.tokens.size
        if not 1 <= self.sequence_length < size:
            said = f"a sample takes 2 tokens or more, and there are {size};"
            if size > 1:
                most = f"must be from 1 to {size - 1}, since there are {size} tokens"
                said = f"{self.sequence_length} {most}; change it, or"
            kind = "held-out data" if self.name.endswith(" validation") else "data"
            raise DataError(f"data.sequence_length ({self.name}): {said} bring more {kind}")

    @property
    def targets_per_sample(self) -> int | None:
        return None if self.mark else self.sequence_length

    def __len__(self) -> int:
        return (self.tokens.size - 1) // self.sequence_length

    def read(self, indices: NDArray[np.int64]) -> tuple[tuple[Tensor, ...], Tensor]:
        """One input, (b, sequence_length) int64, and targets of the same shape and type.

        With a `separator` there is a second input of this shape, int32: `document_starts`. Raises
        DataError for a memory map whose file has been cut.
        """
        self._check_map()
        at = indices[:, None] * self.sequence_length + np.arange(self.sequence_length)
        inputs, targets = (self.tokens[where].astype(np.int64) for where in (at, at + 1))
        if self.mark:
            inputs &= ~self.mark
            targets[targets & self.mark != 0] = IGNORED
        read: tuple[Tensor, ...] = (torch.from_numpy(inputs),)
        if isinstance(self.separator, int | np.integer):
            read += (torch.from_numpy(document_starts(inputs, self.separator)),)
        elif self.separator is not None:
            last = np.searchsorted(self.separator, at, side="right") - 1
            starts = np.maximum(self.separator[last] - at[:, :1], 0)
            read += (torch.from_numpy(starts.astype(np.int32)),)
        return read, torch.from_numpy(targets)

    def _check_map(self) -> None:
        """DataError for a memory map that is longer than its file, whose end would end the
        process."""
        if not isinstance(self.tokens, np.memmap):
            return
        path, needed = Path(str(self.tokens.filename)), self.tokens.nbytes
        with contextlib.suppress(FileNotFoundError):  # a removed file stays mapped
            if path.stat().st_size < needed:
                raise DataError(
                    f"{path}: has {path.stat().st_size} bytes, and had {needed} when it was "
                    f"opened; copy it again, and start with {RESUME_AUTO}"
                )

    def count_targets(self, targets: Tensor) -> int:
        return counted(targets)


def document_starts(tokens: NDArray[np.int64], separator: int) -> NDArray[np.int32]:
    """For each token the position, in its sample, of the first token of its document: (b, s) to
    (b, s). A separator belongs to the document that it ends. A document that has begun in an
    earlier sample begins at 0."""
    starts = np.zeros(tokens.shape, np.int32)
    positions = np.arange(1, tokens.shape[1], dtype=np.int32)
    starts[:, 1:] = np.where(tokens[:, :-1] == separator, positions, 0)
    return np.maximum.accumulate(starts, axis=1)


def counted(targets: Tensor, ignore_index: int | None = IGNORED) -> int:
    """How many targets count in the loss; integers that are `ignore_index` do not."""
    if ignore_index is None or not may_be(targets.dtype, ignore_index):
        return targets.numel()
    return int((targets != ignore_index).sum())


def may_be(dtype: torch.dtype, number: int) -> bool:
    """Whether whole numbers of this type include the number. Torch compares integers in their own
    type, in which one beyond its bounds becomes another number (-100 is 156 in uint8)."""
    if dtype.is_floating_point:
        return False
    if dtype.is_complex or dtype == torch.bool:  # both are compared in another type
        return True
    bounds = torch.iinfo(dtype)
    return bounds.min <= number <= bounds.max


def read_tensors(
    dataset: Dataset, samples: NDArray[np.int64], epochs: NDArray[np.int64]
) -> list[Tensor]:
    """The inputs of samples and, last, their targets; DataError for anything that no layer can
    take."""
    reads_epochs = getattr(dataset, "reads_epochs", False)
    read: Any = dataset.read(*((samples, epochs) if reads_epochs else (samples,)))
    is_pair = isinstance(read, tuple | list) and len(read) == 2
    if not is_pair or not isinstance(read[0], tuple | list):
        what = type(read).__name__
        if is_pair:
            what += f" of {type(read[0]).__name__} and {type(read[1]).__name__}"
        raise DataError(
            f"data ({dataset.name}): read returns {what}; return two things, a tuple of inputs "
            "and the targets"
        )
    inputs, targets = read
    for tensor in (*inputs, targets):
        what = type(tensor).__name__
        if isinstance(tensor, Tensor):
            is_dense = tensor.layout == torch.strided and tensor.device.type == "cpu"
            is_real = not (tensor.is_quantized or tensor.is_complex())
            if is_dense and is_real and tensor.shape[:1] == (len(samples),):
                continue
            kind = f"{tensor.dtype}, {tensor.layout}".replace("torch.", "")
            what += f" {tuple(tensor.shape)} of {kind} on {tensor.device}"
        raise DataError(
            f"data ({dataset.name}): {len(samples)} samples are read as {what}; give dense tensors "
            "of real numbers in CPU memory, samples first (of from_torch by a collate_fn)"
        )
    return [*inputs, targets]
