"""Takes a data set of torch (`torch.utils.data.Dataset`) as samples of axsparse."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, default_collate

from axsparse.data.dataset import counted, may_be, read_tensors
from axsparse.runtime.canonical_form import digest_of
from axsparse.runtime.errors import DataError, check_kinds, one_line
from axsparse.runtime.seeds import keyed_generator, preserved_rng
from axsparse.runtime.targets import IGNORED

AT_ONCE = 4
"""Samples that `from_torch` reads together; the first of them are evenly spread."""
COMPARED = 32
"""Samples, most of them drawn by the length of the data set, that a fingerprint is made from."""
TWICE_SECONDS = 2.0
"""How long `from_torch` reads samples after the first ones a second time."""
SHIFTED = 'the inputs x["input_ids"][:, :-1] and the targets x["labels"][:, 1:]'
"""The samples for next tokens in a batch x of transformers, whose own models shift the labels."""
UNFIT = (TypeError, ValueError, RuntimeError)
WHY = 200
"""The length to which the reason of an error is cut, in letters."""

DRAWS = (
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial"),
    *("uniform_", "normal_", "random_", "bernoulli_", "exponential_", "geometric_"),
    *("cauchy_", "log_normal_", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
)
"""The functions and methods of torch that draw random numbers and take a generator."""
DRAWS_LIKE: dict[str, Callable[..., Tensor]] = {
    "rand_like": Tensor.uniform_,
    "randn_like": Tensor.normal_,
    "randint_like": Tensor.random_,
}
"""Functions that draw a tensor like another one, and the methods by which they fill it: only recent
versions of torch let these functions take a generator."""
SEEDS_OF_GPUS = ("manual_seed", "manual_seed_all", "set_rng_state")
"""Functions of torch.cuda that seed GPUs; `torch.manual_seed` and `torch.random.fork_rng` call
them."""
READING = threading.RLock()
"""Held while samples are read: data sets of torch are made for one thread, and the parts of a
`random_split` have one in common."""
OF_BATCHES = torch.Generator()
"""The random numbers of `collate_fn`: where it does not seed them, batches read again differ."""


def from_torch(
    dataset: Any,
    collate_fn: Callable[[list[Any]], Any] = default_collate,
    *,
    name: str | None = None,
    vocab_size: int | None = None,
    count_targets: Callable[[Tensor], int] | None = None,
    seed: int = 0,
) -> TorchSamples:
    """A data set of torch as a `Dataset`.

    `dataset` has a length and gives a sample for each number; `collate_fn` makes the inputs and the
    targets of a list of samples: a pair, whose first is a tensor or a tuple of tensors and whose
    second is a tensor, all with the samples first. `default_collate` does so for samples that are
    pairs themselves.

    Random numbers that `dataset` draws by torch for a sample (crops, flips and noise of
    torchvision, for example) come from a generator that is keyed by `seed`, epoch and sample: they
    change from epoch to epoch, and are the same in every layout and after a resumption. Evaluations
    draw as in epoch 0. `torch.manual_seed` in `dataset` seeds this generator. Random numbers of
    Python, of numpy and of custom generators are rejected, and so are draws of `collate_fn` that it
    does not seed. One thread at a time reads.

    `name` appears in the banner and in messages. `vocab_size` is for samples of tokens, whose ids
    are all below it. `count_targets` says how many targets of a microbatch count in the loss; by
    default all of them do but integers that are -100, which cross entropy leaves out.

    Raises DataError for a data set that has no length or no sample, one whose samples are no such
    pairs or cannot be collated, and one that gives other values when a sample is read again. Its
    `fingerprint` is its length and a digest of 32 samples.
    """
    name = type(dataset).__name__ if name is None else name
    optional = {"vocab_size": "whole number or None", "count_targets": "function or None"}
    check_kinds("from_torch", locals(), name="text", **optional)
    length = _length_of(dataset, name)
    samples = TorchSamples(
        name, "", vocab_size, None, None, dataset, length, collate_fn, count_targets, seed
    )
    with preserved_rng():
        read = [*_compared(samples)]
    targets = read[0][-1]
    all_count = all(counted(tensors[-1]) == tensors[-1].numel() for tensors in read if tensors)
    is_complete = count_targets is None and all_count
    of_first = targets.numel() // len(targets) if is_complete else None
    # A later sample may have integers that do not count.
    per_sample = None if may_be(targets.dtype, IGNORED) else of_first
    digest = digest_of(
        ((number, place), tensor)
        for number, tensors in enumerate(read)
        for place, tensor in enumerate(tensors)
    )
    return replace(
        samples,
        fingerprint=f"{length} {digest}",
        targets_per_sample=per_sample,
        targets_of_first=of_first,
    )


def _has_numbers(dataset: object) -> bool:
    """Whether it gives samples by their numbers; torch's base class raises instead."""
    has_members = all(hasattr(dataset, member) for member in ("__len__", "__getitem__"))
    return has_members and getattr(type(dataset), "__getitem__", None) is not Dataset.__getitem__


def _length_of(dataset: Any, name: str) -> int:
    """The number of samples; DataError if there is none, or if they have no numbers, for a loader,
    data sets by name, and a data set of axsparse."""
    for kind, why in ((DataLoader, "makes batches"), (Mapping, "is no data set")):
        if isinstance(dataset, kind):
            raise DataError(f"from_torch ({name}): a {kind.__name__} {why}; {advice_for(dataset)}")
    if hasattr(dataset, "fingerprint") and hasattr(dataset, "read"):
        raise DataError(f"from_torch ({name}): it is a Dataset of axsparse; give it as it is")
    example = "such as a list of what an iterable one yields"
    advice = f"give a data set with __len__ and __getitem__, {example}"
    with _rejecting(f"from_torch ({name}): its length cannot be read", advice):
        length = len(dataset) if _has_numbers(dataset) else 0
    if not length:
        raise DataError(
            f"from_torch ({name}): it has no length, or gives no sample by its number; {advice}"
        )
    return length


def _compared(samples: TorchSamples) -> Iterator[list[Tensor]]:
    """The tensors of the samples that a fingerprint is made from, by `AT_ONCE` of them.

    DataError for samples that differ when they are read again. Of those after the first ones,
    samples that cannot be read give nothing: a run may never come to them.
    """
    length, began = len(samples), time.monotonic()
    first = np.unique(np.linspace(0, length - 1, AT_ONCE).astype(np.int64))
    generator = keyed_generator("compared", length)
    drawn = torch.randint(length, (COMPARED - AT_ONCE,), generator=generator).numpy()
    others = np.setdiff1d(np.arange(length) if length <= COMPARED else drawn, first)
    parts = (others[start : start + AT_ONCE] for start in range(0, len(others), AT_ONCE))
    for some in (first, *parts):
        try:
            tensors = again = read_tensors(samples, some, np.zeros_like(some))
            if some is first or time.monotonic() - began < TWICE_SECONDS:
                again = read_tensors(samples, some, np.zeros_like(some))
        except Exception:
            if some is first:
                raise
            tensors = again = []
        if digest_of(enumerate(tensors)) != digest_of(enumerate(again)):
            raise DataError(
                f"from_torch ({samples.name}): its samples differ when they are read again; draw "
                "random numbers by torch.rand, torch.randint and their like, in __getitem__, where "
                "seed, epoch and sample seed them"
            )
        yield tensors


MEMBERS = (
    *("name", "fingerprint", "vocab_size", "targets_per_sample"),
    *("__len__", "count_targets", "read"),
)
"""The members of a `Dataset`."""


def reject_no_dataset(where: str, given: object) -> None:
    """DataError for something that is no `Dataset` of axsparse."""
    missing = [member for member in MEMBERS if not hasattr(given, member)]
    if missing:
        raise DataError(
            f"{where}: {type(given).__name__} has no {', '.join(missing)}, which data sets have; "
            f"{advice_for(given)}"
        )


def advice_for(given: object) -> str:
    """The suggestion for something that is no `Dataset` of axsparse."""
    if isinstance(given, str):
        return "give ax.tokens(FOLDER) as the data, or folders to blend as the setting data.blend"
    if isinstance(given, DataLoader):
        why = "batch.global_batch_size, batch.microbatch_size and seed say what a batch is"
        collate, numbers = "", "[*loader.sampler]"
        if given.batch_sampler is not None:
            collate = ", loader.collate_fn"
            numbers = "[n for batch in loader.batch_sampler for n in batch]"
        if not _has_numbers(given.dataset):
            way = f"ax.from_torch([*loader.dataset]{collate})"
            return f"give a list of what its data set yields, {way}, since {why}"
        return (
            f"give its data set, ax.from_torch(loader.dataset{collate}), since {why}; where its "
            "sampler leaves samples out or repeats them, give those that it draws once, after "
            "torch.manual_seed(0), "
            f"ax.from_torch(torch.utils.data.Subset(loader.dataset, {numbers}){collate})"
        )
    if isinstance(given, Mapping) and any(isinstance(one, Tensor) for one in given.values()):
        return "give its inputs and targets by ax.ArrayDataset(INPUTS, TARGETS)"
    if isinstance(given, Mapping):  # such as a DatasetDict
        return f"give one of its data sets by ax.from_torch(splits[{next(iter(given), 'train')!r}])"
    if hasattr(given, "__iter__") and not _has_numbers(given):
        return "make one of what it yields by ax.from_torch([*dataset])"
    return (
        "make one of it by ax.from_torch(dataset), of tensors by ax.ArrayDataset(inputs, targets), "
        "or give a class with the members of axsparse.Dataset"
    )


@dataclass(frozen=True, eq=False)
class TorchSamples:
    """The samples of a data set of torch, as `from_torch` makes it: a `Dataset`."""

    name: str
    fingerprint: str
    vocab_size: int | None
    targets_per_sample: int | None
    targets_of_first: int | None
    """How many targets each of the first samples has; None if some of them do not count."""
    dataset: Any
    length: int
    collate_fn: Callable[[list[Any]], Any]
    counts: Callable[[Tensor], int] | None
    seed: int
    reads_epochs = True

    def __len__(self) -> int:
        return self.length

    def read(
        self, indices: NDArray[np.int64], epochs: NDArray[np.int64] | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The inputs and the targets of the samples with these numbers, as in these epochs; in
        epoch 0 without any."""
        epochs = np.zeros_like(indices) if epochs is None else epochs
        samples = []
        with READING:
            for sample, epoch in zip(indices.tolist(), epochs.tolist(), strict=True):
                with _DrawnFrom(keyed_generator("from_torch", self.seed, epoch, sample)):
                    samples.append(self.dataset[sample])
            with _DrawnFrom(OF_BATCHES):
                collated = self._collated(samples, indices)
        if not isinstance(collated, (tuple, list)) or len(collated) != 2:
            names: set[str] = {*getattr(collated, "keys", tuple)()}
            shown = f" (for next tokens {SHIFTED})" if {"input_ids", "labels"} <= names else ""
            raise DataError(
                f"from_torch ({self.name}): samples are collated to {type(collated).__name__}; "
                "give a collate_fn that returns two things, the inputs (a tensor or a tuple of "
                f"tensors) and the targets{shown}"
            )
        inputs, targets = collated
        inputs = tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
        if not isinstance(targets, Tensor):
            return inputs, targets  # which `read_tensors` refuses
        each, count = self.targets_of_first, counted(targets)
        is_padded = self.targets_per_sample is None and count < targets.numel()
        if each is not None and count != each * len(samples) and not is_padded:
            raise DataError(
                f"from_torch ({self.name}): samples {', '.join(map(str, indices))} have "
                f"{count} targets that count, and the first samples {each} each; give "
                "count_targets, which says how many of a microbatch count in the loss"
            )
        return inputs, targets

    def _collated(self, samples: list[Any], indices: NDArray[np.int64]) -> Any:
        """A batch of samples; DataError for the first that does not go with those before it."""
        try:
            return self.collate_fn(samples)
        except UNFIT:
            advice = "give pairs of tensors of equal shapes, or a collate_fn that makes a batch"
            for last, sample in enumerate(indices):
                with _rejecting(
                    f"from_torch ({self.name}): sample {sample} cannot be collated", advice
                ):
                    self.collate_fn(samples[: last + 1])
            raise

    def count_targets(self, targets: Tensor) -> int:
        return counted(targets) if self.counts is None else self.counts(targets)


@contextmanager
def _rejecting(what: str, advice: str) -> Iterator[None]:
    """DataError for what Python and torch raise about a length or a sample that does not fit."""
    try:
        yield
    except UNFIT as reason:
        raise DataError(f"{what} ({one_line(reason)[:WHY]}); {advice}") from reason


class _DrawnFrom(TorchFunctionMode):
    """Lets torch draw from a generator, and seed it, in this thread and within the block.

    The default generators, which dropout draws from in another thread, are left alone:
    `torch.manual_seed`, `torch.get_rng_state` and their like are no functions that a mode sees, and
    find the generator in their module. `READING` is held.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> _DrawnFrom:
        thread, places = threading.get_ident(), [(torch.cuda, name) for name in SEEDS_OF_GPUS]
        places.append((torch.random, "default_generator"))
        self._before = [(module, name, getattr(module, name)) for module, name in places]
        for module, name, value in self._before[:-1]:
            setattr(module, name, partial(_seed_elsewhere, thread, value))
        setattr(*places[-1], _ThreadGenerator(thread, self._generator))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        for module, name, value in self._before:
            setattr(module, name, value)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        if name in DRAWS_LIKE:
            return _drawn_like(DRAWS_LIKE[name], self._generator, *args, **kwargs)
        if name in DRAWS:
            kwargs = {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class _ThreadGenerator:
    """torch's default generator for all threads but one."""

    thread: int
    own: torch.Generator

    def __getattr__(self, name: str) -> Any:
        is_own = threading.get_ident() == self.thread
        return getattr(self.own if is_own else torch.default_generator, name)


def _seed_elsewhere(thread: int, seed: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if threading.get_ident() != thread:
        seed(*args, **kwargs)


def _drawn_like(
    fill: Callable[..., Tensor],
    generator: torch.Generator,
    input: Tensor,  # noqa: A002 - torch's own name
    *bounds: int,
    requires_grad: bool = False,
    **options: Any,
) -> Tensor:
    """A tensor like `input` that a method fills with random numbers, as `torch.rand_like` and its
    like do; `bounds` are the arguments of the method."""
    options.pop("generator", None)
    bounds += tuple(options.pop(name) for name in ("low", "high") if name in options)
    return fill(torch.empty_like(input, **options), *bounds, generator=generator).requires_grad_(
        requires_grad
    )
