"""The Early-Bird search: the network stays dense until the mask of highest scores settles.

You et al., "Drawing Early-Bird Tickets" (ICLR 2020), prune channels by their BatchNorm scales; here
single weights are pruned. In a round, every `interval` steps, the mask that pruning would give is
compared with the mask of the round before. There are two distances, computed from integers that are
summed over stages:

    hamming = mismatched / total
    churn   = mismatched / (2 · kept)

The Hamming distance is at most twice the density: at 95 % sparsity even independent masks are
within 0.1 of each other. Churn is the share of kept entries that was exchanged, at any density,
and decides.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from axsparse.config.validate import DISTANCES
from axsparse.pruning.criteria import Criterion
from axsparse.pruning.methods.live_masks import LiveMasks, ScoredMasks
from axsparse.pruning.methods.pruner import MaskUpdate, MethodState, PrunerState, Read, StepContext
from axsparse.runtime.errors import TrainingError, everywhere
from axsparse.samo.selection import count_kept

KIND = "search"

Outcome: TypeAlias = Literal["search", "draw", "exhausted"]
"""The outcome of one round. `draw`: the mask has settled. `search`: rounds are left. `exhausted`:
none is left before `max_steps`."""


@dataclass
class EarlyBirdSearch:
    """Draws a mask at intervals of successful steps, and prunes once the last `DISTANCES` churns
    are below `threshold`; TrainingError if they are not by `max_steps`.

    One bit is kept for each entry that is compared.
    """

    live: LiveMasks
    criterion: Criterion
    interval: int
    """The number of steps between rounds, from `start_step` on."""
    start_step: int
    max_steps: int
    threshold: float
    is_done: bool = False
    masks: dict[str, Tensor] = field(default_factory=dict)
    """The bit-packed masks of the last round, by name of this rank's tensors."""
    churns: deque[float] = field(default_factory=lambda: deque(maxlen=DISTANCES))
    """The last churns, oldest first; the same on all ranks."""
    last_step: int | None = None
    """How many steps had succeeded at the last round; None before the first round."""

    @property
    def unfinished(self) -> str | None:
        if self.is_done:
            return None
        return (
            "early-bird drew no mask: skipped steps do not count, and those that did were over "
            "before pruning.until_step; train longer, or search shorter"
        )

    def before_step(self, now: StepContext) -> MaskUpdate | None:
        if self.is_done or not self.is_due(now.updates):
            return None
        masks = self.live.masks(self.criterion, lambda final: final)
        outcome, figures = self.decide(now.updates, *self._counts(masks))
        said = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        if outcome == "search":
            return MaskUpdate(f"early-bird looks: {said or 'first mask'}", figures, changed=False)
        if outcome == "exhausted":
            raise everywhere(
                TrainingError(
                    f"step {now.step}: early-bird: no mask has settled by pruning.until_step "
                    f"(last: {said}, pruning.threshold is above); search longer, or raise the "
                    "threshold"
                )
            )
        self.is_done = True
        self.live.prune(masks)
        figures |= self.live.figures()
        return MaskUpdate(f"early-bird draws: {said}", figures, is_final=True)

    def is_due(self, successful_steps: int) -> bool:
        """Whether a round is due after `successful_steps`: at the first time only where a
        step that overflows has the same number come twice."""
        since = successful_steps - self.start_step
        return since >= 0 and since % self.interval == 0 and successful_steps != self.last_step

    def _counts(self, masks: ScoredMasks) -> list[int]:
        """The entries of all stages' pruned tensors that differ from the last round's masks, all of
        them, and the kept ones."""
        live = self.live
        counts = torch.zeros(3, dtype=torch.int64)
        for owner, state, tensor in live.counted():
            shape = live.targets.shapes[owner]
            mask = masks.mask(owner, shape, partial(state.dense_master, tensor.full_name))
            counts += torch.tensor([self.compare(owner, mask), mask.numel(), int(mask.sum())])
        return list(live.total(counts).tolist())

    def compare(self, name: str, mask: Tensor) -> int:
        """How many entries differ from the last round's mask, which `mask`, of the same shape,
        then replaces; 0 in the tensor's first round."""
        # Low bits first, as checkpoints have these masks; mask files have high bits first.
        new = torch.from_numpy(np.packbits(mask.reshape(-1).numpy(), bitorder="little"))
        old = self.masks.get(name, new)
        # The old tensor is not written to, since a checkpoint may still be reading it.
        self.masks[name] = new
        return count_kept(new ^ old)

    def decide(
        self, successful_steps: int, mismatched: int, total: int, kept: int
    ) -> tuple[Outcome, dict[str, float]]:
        """End a round, by the sums of `_counts`: its outcome, and its distances, of which the first
        round has none."""
        assert 0 <= mismatched <= 2 * kept and 0 <= kept <= total
        is_first, self.last_step = self.last_step is None, successful_steps
        distances: dict[str, float] = {}
        if not is_first:
            distances = {"churn": mismatched / max(2 * kept, 1), "hamming": mismatched / total}
            self.churns.append(distances["churn"])
            if len(self.churns) == DISTANCES and max(self.churns) < self.threshold:
                return "draw", distances
        is_last = successful_steps + self.interval > self.max_steps
        return "exhausted" if is_last else "search", distances

    def state(self) -> PrunerState:
        if self.is_done:
            return PrunerState(MethodState(is_done=True))
        method_state = MethodState(distances=tuple(self.churns), last_look=self.last_step)
        return PrunerState(method_state, {KIND: dict(self.masks)})

    def restore(self, method_state: MethodState, read: Read) -> None:
        self.is_done = method_state.is_done
        self.last_step = method_state.last_look
        self.churns.extend(method_state.distances)
        if method_state.last_look is None:
            return
        for owner, _, _ in self.live.counted():
            mask = read(KIND, owner)
            if mask.dtype == torch.uint8:  # A frozen tensor had no mask: its first round is ahead.
                self.masks[owner] = mask
