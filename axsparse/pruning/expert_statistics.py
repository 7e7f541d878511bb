"""Statistics of the inputs of experts: matrices in a stack, each with the tokens that it was given.

No module calls an expert's matrix by itself, so that products themselves are watched: an operation
of torch that multiplies with a stack, or with one matrix of it, shows the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from axsparse.pruning.input_statistics import HowMany, SparseGptStatistics, WandaStatistics
from axsparse.runtime.errors import ConfigError


class ExpertStatistics:
    """Gathers statistics for each matrix of a stack, then prunes each by itself."""

    def __init__(
        self,
        method: type[WandaStatistics | SparseGptStatistics],
        name: str,
        stack: Tensor,
        inputs: int,
    ) -> None:
        """`inputs` is the dimension of the inputs in the stack, (E, outputs, inputs) or
        (E, inputs, outputs)."""
        self._name, self._stack, self._dimension = name, stack, inputs
        self._experts = [method(stack.shape[inputs], stack.device) for _ in stack]
        self._tokens = [0] * len(stack)
        self.changes_weights = method.changes_weights

    @property
    def unmet(self) -> list[str]:
        """The matrices that no token met."""
        return [f"{self._name}[{n}]" for n, tokens in enumerate(self._tokens) if not tokens]

    def add(self, inputs: Tensor, matrix: Tensor, offsets: Sequence[int] | None) -> None:
        """Count a product of inputs, (tokens, inputs), with one matrix, (inputs, outputs).

        Of the full stack, (E, inputs, outputs), each expert has separate tokens, (E, tokens,
        inputs), or the tokens from the offset of the expert before it up to its offset.
        """
        # The strides show the orientation of the stack: neighbours are entries of its last
        # dimension.
        is_last = matrix.stride(-2) == 1
        if min(matrix.shape[-2:]) > 1 and is_last != (self._dimension == 2):
            raise ConfigError(
                f"pruning.method: {self._name} is multiplied by its other dimension; name it in "
                "pruning.exclude"
            )
        if matrix.dim() == 2:
            first = matrix.storage_offset() - self._stack.storage_offset()
            self._count(first // self._stack[0].numel(), inputs)
            return
        for expert in range(len(self._experts)):
            if offsets is None:
                self._count(expert, inputs[expert])
            else:
                begin = offsets[expert - 1] if expert else 0
                self._count(expert, inputs[begin : offsets[expert]])

    def _count(self, expert: int, inputs: Tensor) -> None:
        if len(inputs):
            self._experts[expert].add(inputs)
            self._tokens[expert] += len(inputs)

    def prune(self, weight: Tensor, how_many: HowMany) -> tuple[Tensor, Tensor]:
        """The bool mask and the weights of the full stack, see `InputStatistics.prune`.

        An expert that no token met is pruned by magnitude: as if it had met each input once, alone.
        """
        mask = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
        after = torch.empty_like(weight)
        for expert, statistics in enumerate(self._experts):
            if not self._tokens[expert]:
                statistics.add(torch.eye(weight.shape[self._dimension], device=weight.device))
            parts = [tensor[expert] for tensor in (weight, mask, after)]
            if self._dimension == 1:
                parts = [part.t() for part in parts]
            before, *into = parts
            found = statistics.prune(before.contiguous(), how_many)
            for part, result in zip(into, found, strict=True):
                part.copy_(result)
            del found, result  # Freed before the next expert needs memory.
        return mask, after


class ExpertProducts(TorchDispatchMode):
    """Adds the inputs of every product with one of some stacks to its statistics."""

    def __init__(
        self, stacks: Mapping[str, Tensor], gathered: Mapping[str, ExpertStatistics]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._gathered = {_storage(stack): gathered[name] for name, stack in stacks.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = func.overloadpacket.__name__
        if operation in ("mm", "bmm", "addmm", "baddbmm") or operation.endswith("grouped_mm"):
            # The summand comes first in addmm and baddbmm.
            inputs, matrix = args[operation in ("addmm", "baddbmm") :][:2]
            own = self._gathered.get(_storage(matrix))
            if own is not None:
                offsets: Tensor | None = None
                if "grouped" in operation:
                    offsets = kwargs["offs"] if "offs" in kwargs else args[2]
                own.add(inputs, matrix, None if offsets is None else offsets.tolist())
        return func(*args, **kwargs)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
