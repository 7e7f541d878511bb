"""Bytes of training state: the one place that knows what a parameter costs.

Per tensor of n entries of which k are kept, w bytes a weight, a bytes an accumulated
gradient entry, m moments (DESIGN: 20φ → 2φ + 18fφ for half AdamW with an int32 index):

    weight     w·n
    index      4·k if pruned, else 0
    gradient   a·k
    master     4·k in half precision; 0 in fp32, where the weight is the master
    optimizer  4·m·k

The second use of a tied weight costs its own full state on another stage, and only its
own gradient where both uses are on one stage.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

INDEX_BYTES = 4
MASTER_BYTES = 4
MOMENT_BYTES = 4


@dataclass(frozen=True)
class StateBytes:
    """Bytes by category."""

    weight: int = 0
    index: int = 0
    gradient: int = 0
    master: int = 0
    optimizer: int = 0

    @property
    def total(self) -> int:
        return self.weight + self.index + self.gradient + self.master + self.optimizer

    def __add__(self, other: StateBytes) -> StateBytes:
        return StateBytes(
            *(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True))
        )

    @staticmethod
    def sum(parts: Iterable[StateBytes]) -> StateBytes:
        """The sum over tensors or layers."""
        total = StateBytes()
        for part in parts:
            total = total + part
        return total


@dataclass(frozen=True)
class TensorSize:
    """What the formula needs to know of one tensor."""

    numel: int
    kept: int
    trained: bool = True
    """False for frozen parameters, which are weight only, tied or not."""
    is_alias: bool = False
    """The second use of a tied weight on the stage of the first."""


def tensor_bytes(size: TensorSize, *, half: bool, gradient_bytes: int, moments: int) -> StateBytes:
    """The formula above for one tensor."""
    weight_bytes = 2 if half else 4
    if not size.trained:
        return StateBytes(weight=weight_bytes * size.numel)
    if size.is_alias:
        return StateBytes(gradient=gradient_bytes * size.kept)
    return StateBytes(
        weight=weight_bytes * size.numel,
        index=INDEX_BYTES * size.kept if size.kept < size.numel else 0,
        gradient=gradient_bytes * size.kept,
        master=MASTER_BYTES * size.kept if half else 0,
        optimizer=MOMENT_BYTES * moments * size.kept,
    )
