"""Names the sample that has an index beyond the rows, classes or entries, once torch has refused
it.

A usual forward checks no index. A forward that fails runs a second time, in which every index is
checked before torch uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from axsparse.runtime.errors import DataError

IGNORED = -100
"""The target that does not count, as in `torch.nn.functional.cross_entropy`."""
Result = TypeVar("Result")


class IndexBeyondError(IndexError):
    """An index beyond the size of what it numbers."""

    def __init__(self, indices: Tensor, first: int, value: int, what: str) -> None:
        """`first` is the flat position of `value` in `indices`; `what` says what it is not."""
        super().__init__(f"{value} is {what}")
        self.indices = indices
        self.first = first
        self.is_shared = False
        """Whether the indices follow from no sample, such as positions that all samples share."""


def refuse_beyond(
    indices: Tensor, size: int, what: str, *, least: int = 0, ignored: int | None = None
) -> None:
    """IndexBeyondError for the first index that is not from `least` to `size` - 1, nor `ignored`.

    `what` names such an index, as in "no word of a vocabulary of 100". Indices on the meta device
    have no values, and none is refused.
    """
    if indices.is_meta:
        return
    flat = indices.reshape(-1)
    wrong = (flat < least) | (flat >= size)
    if ignored is not None:
        wrong &= flat != ignored
    if wrong.any():
        first = int(wrong.int().argmax())
        raise IndexBeyondError(indices, first, int(flat[first]), what)


def telling_sample(
    run: Callable[[], Result],
    data: Sequence[Tensor | None],
    samples: Sequence[int],
    source: str = "",
) -> Result:
    """What `run` returns, which computes with the tensors `data` of a microbatch. `samples` are the
    numbers of its samples in the data `source`.

    If torch raises an error about an index, DataError with sample, position, value and bound.
    Indices that do not follow from `data`, and those that do not have the samples first, are told
    without a sample.
    """
    try:
        return run()
    except (IndexError, RuntimeError) as error:
        if type(error) not in (IndexError, RuntimeError, IndexBeyondError):
            raise
        beyond = error if isinstance(error, IndexBeyondError) else _found_again(run, data)
        if beyond is None:
            raise
        raise DataError(_text(beyond, samples, source)) from error


def _found_again(
    run: Callable[[], object], data: Sequence[Tensor | None]
) -> IndexBeyondError | None:
    """The index beyond a bound that a second run meets; None if the second run fails in another
    way, or does not fail."""
    try:
        with _Looking(data):
            run()
    except IndexBeyondError as found:
        return found
    except Exception:
        return None
    return None


def _text(found: IndexBeyondError, samples: Sequence[int], source: str) -> str:
    where = "; ".join(getattr(found, "__notes__", [])) or "the loss"
    at, mend = f"position {found.first}", "mend the sample, or make the model larger"
    number, sizes = len(samples), [size for size in found.indices.shape if size != 1]
    is_by_sample = number == 1 or len(sizes) < 2 or sizes[0] == number
    each, rest = divmod(found.indices.numel(), max(1, number))
    if found.is_shared:
        at += " of indices that all samples share, such as their positions"
        mend = "give shorter samples, or make the model larger"
    elif is_by_sample and each and not rest:
        at = f"sample {samples[found.first // each]}, position {found.first % each}"
    return f"data{f' ({source})' if source else ''}: {at}: {found} ({where}); {mend}"


class _Looking(TorchFunctionMode):
    """Checks the indices of embeddings, losses, gathers and one-hot encodings before torch uses
    them, and follows which tensors are computed from the data of the microbatch."""

    def __init__(self, data: Sequence[Tensor | None]) -> None:
        super().__init__()
        self._of_data = WeakValueDictionary({id(t): t for t in data if t is not None})

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            _refuse_beyond_in(func, args, kwargs)
        except IndexBeyondError as found:
            found.is_shared = not self._is_of_data(found.indices)
            raise
        result = func(*args, **kwargs)
        if any(map(self._is_of_data, _tensors_in(_read(func, args, kwargs)))):
            changed = args[0] if func is Tensor.__setitem__ else result
            self._of_data.update((id(one), one) for one in _tensors_in(changed))
        return result

    def _is_of_data(self, tensor: Tensor) -> bool:
        return self._of_data.get(id(tensor)) is tensor


def _read(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments whose values a function reads; of others it reads the shape alone."""
    name = getattr(func, "__name__", "")
    if name.endswith("_like") or name.startswith("new_"):
        return ()
    return args[:1] if name.endswith("_as") else (args, kwargs)


def _tensors_in(found: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results."""
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, (tuple, list, dict)):
        for each in found.values() if isinstance(found, dict) else found:
            yield from _tensors_in(each)


def _refuse_beyond_in(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """IndexBeyondError for the first index that this call of torch would not find."""
    if func in (F.embedding, F.embedding_bag):
        indices, table = _arguments(args, kwargs, "input", "weight")
        rows = table.shape[0]
        refuse_beyond(indices, rows, f"no row of a table of {rows}, 0 to {rows - 1}")
    elif func in (F.cross_entropy, F.nll_loss):
        scores, targets = _arguments(args, kwargs, "input", "target")
        if not targets.is_floating_point():
            classes = scores.shape[1 if scores.dim() > 1 else 0]
            ignored = kwargs.get("ignore_index", IGNORED)
            what = f"none of {classes} classes, 0 to {classes - 1}, or {ignored}"
            refuse_beyond(targets, classes, what, ignored=ignored)
    elif func in (torch.gather, Tensor.gather, torch.index_select, Tensor.index_select):
        table, dim, indices = _arguments(args, kwargs, "input", "dim", "index")
        size = table.shape[dim]
        refuse_beyond(indices, size, f"no entry of {size}, 0 to {size - 1}")
    elif func is Tensor.__getitem__ and isinstance(args[1], Tensor) and _counts(args[1]):
        size = args[0].shape[0]
        refuse_beyond(args[1], size, f"no row of {size}, 0 to {size - 1}", least=-size)
    elif func is F.one_hot:
        [numbers] = _arguments(args, kwargs, "tensor")
        classes = kwargs.get("num_classes", (*args, -1)[1] if args else -1)
        if classes > 0:
            refuse_beyond(numbers, classes, f"none of {classes} classes, 0 to {classes - 1}")


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """The first arguments of a function, given by place or by name."""
    return [args[at] if at < len(args) else kwargs[name] for at, name in enumerate(names)]


def _counts(indices: Tensor) -> bool:
    """Whether indices are numbers of rows, and no mask."""
    return not indices.is_floating_point() and indices.dtype not in (torch.bool, torch.uint8)
