"""Finds out when the mask of a dense run has stopped changing: the Early-Bird criterion.

You et al., "Drawing Early-Bird Tickets" (ICLR 2020), prune channels by their BatchNorm scales;
here single weights are pruned. In a round, every `interval` steps, the mask that pruning would
give is compared with that of the round before. There are two distances, computed from integers
that are summed over stages:

    hamming = mismatched / total
    churn   = mismatched / (2 · kept)

The Hamming distance is at most twice the density: at 95 % sparsity even independent masks are
within 0.1 of each other. Churn is the share of kept entries that was exchanged, at any density.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Metric = Literal["churn", "hamming"]

CHUNK = 1 << 20
"""How many packed bytes are compared at a time."""
BITS = np.array([number.bit_count() for number in range(256)], dtype=np.uint8)
"""The number of set bits of every byte."""


class MaskConvergence:
    """Judges on one rank whether masks have settled.

    If a round is `due`, call `compare` for each tensor of the rank, sum the counts over stages,
    and call `judge` with the sums. One bit is held for each entry that was compared.
    """

    def __init__(
        self,
        *,
        interval: int,
        start_step: int,
        max_steps: int,
        length: int = 5,
        threshold: float = 0.1,
        metric: Metric = "churn",
    ) -> None:
        """Rounds come every `interval` steps from `start_step` on. Masks have settled once the
        last `length` distances are below `threshold`."""
        assert start_step + length * interval <= max_steps, "no draw would be possible"
        self._interval, self._start, self._max_steps = interval, start_step, max_steps
        self._threshold, self._metric = threshold, metric
        self._masks: dict[str, Tensor] = {}
        self._queue: deque[float] = deque(maxlen=length)
        self._last_step: int | None = None

    def due(self, successful_steps: int) -> bool:
        """Whether a round is due after so many successful steps.

        A step that overflows does not count, so the same number can come twice; the round is due
        the first time only.
        """
        since = successful_steps - self._start
        return since >= 0 and since % self._interval == 0 and successful_steps != self._last_step

    def compare(self, name: str, mask: Tensor) -> int:
        """How many entries differ from the last round's mask, which `mask` then replaces.

        `mask` is a bool tensor of the same shape in all rounds. The first round gives 0, which
        `judge` does not take for a distance.
        """
        new = np.packbits(mask.reshape(-1).numpy(), bitorder="little")
        mismatched = 0
        if self._last_step is not None:
            old = self._masks[name].numpy()
            assert old.size == new.size
            for start in range(0, new.size, CHUNK):
                changed = new[start : start + CHUNK] ^ old[start : start + CHUNK]
                mismatched += int(BITS[changed].sum(dtype=np.int64))
        # The old tensor is not written to, since a checkpoint may still be reading it.
        self._masks[name] = torch.from_numpy(new)
        return mismatched

    def judge(self, successful_steps: int, mismatched: int, total: int, kept: int) -> Judgement:
        """End a round and say whether the mask has settled.

        The integers count, over all pruned tensors on all stages, the entries that differ, all
        entries, and those that the mask keeps.
        """
        assert 0 <= mismatched <= 2 * kept and 0 <= kept <= total
        first, self._last_step = self._last_step is None, successful_steps
        hamming = churn = None
        if not first:
            hamming, churn = mismatched / total, mismatched / max(2 * kept, 1)
            self._queue.append(churn if self._metric == "churn" else hamming)
            if len(self._queue) == self._queue.maxlen and max(self._queue) < self._threshold:
                return Judgement("draw", hamming, churn)
        last_round = successful_steps + self._interval > self._max_steps
        return Judgement("exhausted" if last_round else "search", hamming, churn)

    def state(self) -> SearchState:
        """The state that `restore` needs; later rounds do not change it."""
        return SearchState(dict(self._masks), list(self._queue), self._last_step)

    def restore(self, state: SearchState) -> None:
        """Continue a search of the same settings from where it stood after its last round."""
        self._masks = dict(state.masks)
        self._queue.clear()
        self._queue.extend(state.queue)
        self._last_step = state.last_step


@dataclass(frozen=True)
class Judgement:
    """The outcome of one round."""

    outcome: Literal["search", "draw", "exhausted"]
    """`draw`: the mask has settled. `exhausted`: it has not, and no round is left before
    `max_steps`; the caller decides whether to fail or to draw anyway. `search`: rounds are left."""
    hamming: float | None
    churn: float | None
    """Like `hamming`, None in the first round, which has no earlier mask to compare with."""


@dataclass(frozen=True)
class SearchState:
    """What a search needs to go on as if it had never stopped."""

    masks: dict[str, Tensor]
    """The bit-packed uint8 masks of the last round, by name; those of this rank's tensors."""
    queue: list[float]
    """The last distances, oldest first; the same on all ranks."""
    last_step: int | None
    """How many steps had succeeded at the last round; None before the first round."""
