"""What a change of masks is, and who decides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


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
class Now:
    """A moment between two steps."""

    step: int
    """Steps done."""
    updates: int
    """Those of them that updated the weights, since the last rewinding."""
    gradients: Callable[[], None]
    """Computes the gradients of the coming step's batch into the state and updates nothing."""


class Masking(Protocol):
    """Decides between two steps which entries are kept from now on; on all ranks alike."""

    def before_step(self, now: Now) -> Change | None:
        """Called before every step; changes the state, and says what happened."""
        ...

    @property
    def unfinished(self) -> str | None:
        """What a run that ends now has not done, for the user; None if nothing is missing."""
        ...
