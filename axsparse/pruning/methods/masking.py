"""What a change of masks is, and who decides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Change:
    """What happened between two steps, for the records and for those who follow."""

    text: str
    """For the screen."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """For metrics.jsonl."""
    changed: bool = True
    """Whether the kept entries are others than before; a look at the weights leaves them."""
    rewound: bool = False
    """Whether the weights are those of an earlier step; the learning rate begins anew."""
    is_ticket: bool = False
    """Whether the masks are the method's result."""


@dataclass(frozen=True)
class Moment:
    """A moment between two steps."""

    step: int
    """Steps done."""
    updates: int
    """Those of them that updated the weights, since the last rewinding."""
    gradients: Callable[[], None]
    """Computes the gradients of the coming step's batch into the state and updates nothing."""


@dataclass(frozen=True)
class MethodState:
    """How far a method is, in numbers that are the same on all ranks; each has some of them."""

    is_done: bool = False
    """Whether it will change no mask any more."""
    distances: tuple[float, ...] = ()
    """early-bird: the last ones, oldest first."""
    last_look: int | None = None
    """early-bird: updates at the last look at the weights."""
    armed: float | None = None
    """set, rigl: the fraction of the kept entries that moves after the next update."""
    armed_at: int = 0
    """set, rigl: updates when that was decided."""
    holds_weights: bool = False
    """Whether the weights to rewind to are held."""


@dataclass(frozen=True)
class MaskingState:
    """What a method must find again to go on as if the run had never stopped."""

    standing: MethodState
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """By kind, such as "search", and global parameter name; of the tensors of this rank."""


Read = Callable[[str, str], Tensor]
"""A saved tensor by kind and global name; DataError if there is none."""


class Masking(Protocol):
    """Decides between two steps which entries are kept from now on; on all ranks alike."""

    def before_step(self, now: Moment) -> Change | None:
        """Called before every step; changes the state, and says what happened."""
        ...

    @property
    def unfinished(self) -> str | None:
        """What a run that ends now has not done, for the user; None if nothing is missing."""
        ...

    def state(self) -> MaskingState:
        """For `restore`, between `before_step` and the step; later steps do not change it."""
        ...

    def restore(self, standing: MethodState, read: Read) -> None:
        """Go on where another run of the same settings stood, under whatever layout."""
        ...
