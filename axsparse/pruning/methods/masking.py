"""The protocol of a pruning method: `Masking` decides when masks change, and to which.

`Moment` is what a method is told, `Change` what it answers, `MaskingState` what a checkpoint
keeps of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Masking(Protocol):
    """A pruning method: it decides between two steps which entries are kept from then on.

    Every rank has one and calls it at the same moments. A method draws masks from `LiveMasks`
    (`live.masks(criterion, …)`) and applies them with `live.prune(masks)`; it must decide alike
    on all ranks, so whatever it decides by is either the same everywhere or summed with
    `live.total`. The smallest example, which prunes once by magnitude before step 100:

        class AtStep100:
            unfinished = None

            def __init__(self, live: LiveMasks) -> None:
                self._live = live
                self._is_done = False

            def before_step(self, now: Moment) -> Change | None:
                if now.step != 100:
                    return None
                masks = self._live.masks(Criterion("magnitude"), lambda final: final)
                self._live.prune(masks)
                self._is_done = True
                return Change("pruned", self._live.figures(), is_ticket=True)

            def state(self) -> MaskingState:
                return MaskingState(MethodState(is_done=self._is_done))

            def restore(self, standing: MethodState, read: Read) -> None:
                self._is_done = standing.is_done

    To add a method:

    1. Write the class in a file of its own in `pruning/methods/`; `one_shot.py` is a short one.
       What it must know after a resume goes into `MethodState` (numbers that all ranks share) and
       into the tensors of `MaskingState`. `is_done` is True from the moment that a `Change` has
       `is_ticket`: `layout.g_inter_pruned` depends on it.
    2. Add its name to `PruningConfig.method` in `config/schema.py` and say there what it does;
       rules between its settings stand in `config/validate.py` (`check_rounds`, `ONCE`).
    3. Construct it in `method_registry.choose_masking`. If it only needs weights for its first
       mask, add it to `FROM_START` in `pruning/targets.py`: state is then built pruned, and
       `choose_masking` returns None unless the method moves masks later.
    4. Write what it does into the dense `MethodOracle` in `tests/support/methods.py` and add it to
       the `METHODS` of `tests/pruning/methods/test_methods.py` (bitwise the oracle in every
       layout) and of `tests/behavior/test_resume.py` (bitwise the same after a stop at any step).
    5. Add it to the table in `docs/howto/prune.md`.
    """

    def before_step(self, now: Moment) -> Change | None:
        """Change the masks if it is time to; None if nothing was done.

        Called on all ranks once before every step. It may prune the state, rewind the weights,
        and compute gradients with `now.gradients()`. Raises TrainingError, on all ranks alike, if
        the run cannot go on.
        """
        ...

    @property
    def unfinished(self) -> str | None:
        """What is missing if the run ends now, as a text for the user; None if nothing is."""
        ...

    def state(self) -> MaskingState:
        """The state that `restore` needs; later steps do not change what is returned.

        Called after `before_step` and before the step.
        """
        ...

    def restore(self, standing: MethodState, read: Read) -> None:
        """Continue from the state of another run with the same settings, under any layout.

        Called before the first step, when the layers have their saved weights and masks. Raises
        DataError if a saved tensor is missing or does not fit.
        """
        ...


@dataclass(frozen=True)
class Moment:
    """The moment between two steps."""

    step: int
    """Steps done so far."""
    updates: int
    """How many of them updated the weights, since the last rewinding."""
    gradients: Callable[[], None]
    """Computes the gradients of the coming step's batch into the state, without an update."""


@dataclass(frozen=True)
class Change:
    """What a method did between two steps."""

    text: str
    """A description for the screen."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures for metrics.jsonl."""
    changed: bool = True
    """Whether the masks changed; False if the method only looked at the weights."""
    rewound: bool = False
    """Whether the weights went back to an earlier step; the learning rate then begins anew."""
    is_ticket: bool = False
    """Whether the masks are the method's final result."""


@dataclass(frozen=True)
class MethodState:
    """How far a method has come, in numbers that are the same on all ranks.

    Each method uses some of the fields.
    """

    is_done: bool = False
    """Whether the method will change no mask any more."""
    distances: tuple[float, ...] = ()
    """early-bird: the last distances between masks, oldest first."""
    last_look: int | None = None
    """early-bird: how many updates there had been at the last look at the weights."""
    armed: float | None = None
    """set, rigl: the fraction of the kept entries that moves after the next update."""
    armed_at: int = 0
    """set, rigl: how many updates there had been when that was decided."""
    holds_weights: bool = False
    """Whether the weights to rewind to are saved."""


@dataclass(frozen=True)
class MaskingState:
    """What a method needs to go on as if the run had never stopped."""

    standing: MethodState
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """This rank's tensors by kind, such as "search", and then by global parameter name."""


Read = Callable[[str, str], Tensor]
"""Reads a saved tensor by its kind and global name; DataError if there is none."""
