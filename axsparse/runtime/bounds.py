"""Names the sample that has an index beyond the rows, classes or entries, once torch has refused
it.

A usual forward checks no index. A forward that fails runs a second time, in which every index is
checked before torch uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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
        self.numel = indices.numel()
        self.first = first


def refuse_beyond(
    indices: Tensor, size: int, what: str, *, least: int = 0, ignored: int | None = None
) -> None:
    """IndexBeyondError for the first index that is not from `least` to `size` - 1, nor `ignored`.

    `what` names such an index, as in "no word of a vocabulary of 100".
    """
    flat = indices.reshape(-1)
    wrong = (flat < least) | (flat >= size)
    if ignored is not None:
        wrong &= flat != ignored
    if wrong.any():
        first = int(wrong.int().argmax())
        raise IndexBeyondError(indices, first, int(flat[first]), what)


def telling_sample(run: Callable[[], Result], samples: Sequence[int], source: str = "") -> Result:
    """What `run` returns. `samples` are the numbers of its microbatch's samples in the data
    `source`.

    If torch raises an error about an index, DataError with sample, position, value and bound.
    """
    try:
        return run()
    except (IndexError, RuntimeError) as error:
        if type(error) not in (IndexError, RuntimeError, IndexBeyondError):
            raise
        beyond = error if isinstance(error, IndexBeyondError) else _found_again(run)
        if beyond is None:
            raise
        raise DataError(_text(beyond, samples, source)) from error


def _found_again(run: Callable[[], object]) -> IndexBeyondError | None:
    """The index beyond a bound that a second run meets; None if the second run fails in another
    way, or does not fail."""
    try:
        with _Looking():
            run()
    except IndexBeyondError as found:
        return found
    except Exception:
        return None
    return None


def _text(found: IndexBeyondError, samples: Sequence[int], source: str) -> str:
    where = "; ".join(getattr(found, "__notes__", [])) or "the loss"
    each, rest = divmod(found.numel, max(1, len(samples)))
    at = f"position {found.first}"
    if samples and each and not rest:
        at = f"sample {samples[found.first // each]}, position {found.first % each}"
    return (
        f"data{f' ({source})' if source else ''}: {at}: {found} ({where}); mend the sample, or "
        "make the model larger"
    )


class _Looking(TorchFunctionMode):
    """Checks the indices of embeddings, losses, gathers and one-hot encodings before torch uses
    them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
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
        return func(*args, **kwargs)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], *names: str) -> list[Any]:
    """The first arguments of a function, given by place or by name."""
    return [args[at] if at < len(args) else kwargs[name] for at, name in enumerate(names)]


def _counts(indices: Tensor) -> bool:
    """Whether indices are numbers of rows, and no mask."""
    return not indices.is_floating_point() and indices.dtype not in (torch.bool, torch.uint8)
