"""The protocol of a pruning method: a `Pruner` decides when masks change, and how.

A method receives a `StepContext`, answers with a `MaskUpdate`, and saves its `PrunerState` in
checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


class Pruner(Protocol):
    """A pruning method: it decides between two steps which entries are kept from then on.

    Every rank has one and calls it at the same moments. A method draws masks with
    `live.masks(criterion, …)` of `LiveMasks` and applies them with `live.prune(masks)`: masks only
    shrink. It must decide alike on all ranks, so it may use only values that are equal everywhere
    or that `live.total` has summed. The smallest example prunes once by magnitude, before step 100:

        class AtStep100:
            unfinished = None

            def __init__(self, live: LiveMasks) -> None:
                self._live = live
                self._is_done = False

            def before_step(self, now: StepContext) -> MaskUpdate | None:
                if now.step != 100:
                    return None
                masks = self._live.masks(Criterion("magnitude"), lambda final: final)
                self._live.prune(masks)
                self._is_done = True
                return MaskUpdate("pruned", self._live.figures(), is_final=True)

            def state(self) -> PrunerState:
                return PrunerState(MethodState(is_done=self._is_done))

            def restore(self, method_state: MethodState, read: Read) -> None:
                self._is_done = method_state.is_done

    To add a method:

    1. Write the class in `pruning/methods/`; `gradual.py` has a short one.
       What it must know after a resume goes into `MethodState` (numbers that all ranks share) and
       into the tensors of `PrunerState`.
    2. Add its name to `PruningConfig.method` in `config/schema.py` and say there what it does;
       rules between its settings are that section's validators, those with the run's in
       `config/validate.py` (`check_rounds`).
    3. Construct it in `method_registry.choose_pruner`. If it only needs weights for its first
       mask, add it to `FROM_START` in `pruning/targets.py`: state is then built pruned, and
       `choose_pruner` returns None.
    4. Write what it does into the dense `MethodOracle` in `tests/support/methods.py`. Add it to
       `PRUNING` in `tests/support/cases.py`, whose rows compare every layout bitwise with the
       oracle, and to the `METHODS` of `tests/behavior/test_resume.py`, which compares a run bitwise
       with one that stopped and resumed.
    5. Add it to the table in `docs/howto/prune.md`.
    """

    def before_step(self, now: StepContext) -> MaskUpdate | None:
        """Change the masks if it is time to, and return the change; None if there is none.

        Called on all ranks once before every step. It may prune the state, rewind the weights, and
        compute gradients with `now.gradients()`. Raises TrainingError, on all ranks alike, if the
        run cannot continue.
        """

    @property
    def unfinished(self) -> str | None:
        """A text for the user about a search that is unfinished if the run ends now; None if there
        is none."""

    def state(self) -> PrunerState:
        """The state that `restore` needs, as a copy that later steps do not change.

        Called after `before_step` and before the step.
        """

    def restore(self, method_state: MethodState, read: Read) -> None:
        """Continue from the state of another run with the same settings, under any layout.

        Called before the first step, when the layers have their saved weights and masks. `read`
        gives a saved tensor by its kind and name; of a parameter that was frozen its flat value, in
        fp32. Raises DataError if a saved tensor is missing or does not fit.
        """


@dataclass(frozen=True)
class StepContext:
    """The moment between two steps."""

    step: int
    updates: int
    """How many of the steps since the last rewinding updated the weights."""
    gradients: Callable[[], float]
    """Computes the gradients of the coming step's batch into the state, without an update; returns
    the loss scale, by which they are multiplied."""
    loss: Callable[[], float | None]
    """Takes the validation loss of `pruning.eval_steps` batches; None where there are none. All
    ranks call it together."""


@dataclass(frozen=True)
class MaskUpdate:
    """The action of a method between two steps."""

    text: str
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures for metrics.jsonl."""
    changed: bool = True
    """Whether the masks changed; False if the method only looked at the weights."""
    rewound: bool = False
    """Whether the weights went back to an earlier step; the learning rate then begins anew."""
    is_final: bool = False
    """Whether the masks are the method's final result."""


@dataclass(frozen=True)
class MethodState:
    """How far a method has come, in numbers that are the same on all ranks.

    Each method uses only some of the fields.
    """

    is_done: bool = False
    """Whether the method will change no mask any more."""
    distances: tuple[float, ...] = ()
    """The last distances between masks, oldest first (early-bird)."""
    last_look: int | None = None
    """The number of updates before the last mask was drawn (early-bird)."""
    holds_weights: bool = False
    """Whether the weights to rewind to are saved."""


@dataclass(frozen=True)
class PrunerState:
    """The state with which a method continues as if the run had never stopped."""

    method_state: MethodState
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    """This rank's tensors by kind, such as "search", and then by global parameter name."""


Read = Callable[[str, str], Tensor]
"""Reads a saved tensor by its kind and global name; DataError if there is none."""
