"""When the mask of a dense run has stopped changing: the Early-Bird search.

You et al., "Drawing Early-Bird Tickets", ICLR 2020, there for channels by their BatchNorm
scales, here for single weights. Every `interval` steps the mask that pruning would give is
compared with the one before. Two distances, from integers that are summed over stages:

    hamming = mismatched / total
    churn   = mismatched / (2 · kept)

Hamming distance is at most twice the density: at 95 % sparsity even independent masks are
within 0.1 of each other. Churn is the share of kept entries that were exchanged, at any density.
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
"""Packed bytes that are compared at a time."""
BITS = np.array([number.bit_count() for number in range(256)], dtype=np.uint8)
"""How many bits of a byte are set."""


@dataclass(frozen=True)
class Judgement:
    """What one round of masks says."""

    outcome: Literal["search", "draw", "exhausted"]
    """`draw`: the mask has settled. `exhausted`: it has not, and no round is left before
    `max_steps`; whether to fail or to draw anyway is the caller's choice."""
    hamming: float | None
    """None for the first mask, which has none before it; so is churn."""
    churn: float | None


@dataclass(frozen=True)
class SearchState:
    """What a search must find again to go on as if it had never stopped."""

    masks: dict[str, Tensor]
    """Bit-packed masks of the last round, uint8, by name: of the tensors of this rank."""
    queue: list[float]
    """The last distances, oldest first; the same on all ranks."""
    last_step: int | None
    """Successful steps at the last round; None before the first."""


class SettledMask:
    """The search on one rank: `due`, then `compare` for each tensor, then `judge` with the sums.

    It holds one bit an entry of the tensors that were compared.
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
        assert start_step + length * interval <= max_steps, "no draw would be possible"
        self._interval, self._start, self._max_steps = interval, start_step, max_steps
        self._threshold, self._metric = threshold, metric
        self._masks: dict[str, Tensor] = {}
        self._queue: deque[float] = deque(maxlen=length)
        self._last_step: int | None = None

    def due(self, successful_steps: int) -> bool:
        """Whether a round stands at this count of successful steps and was not done yet.

        A step that overflows does not count, so the same count can come twice.
        """
        since = successful_steps - self._start
        return since >= 0 and since % self._interval == 0 and successful_steps != self._last_step

    def compare(self, name: str, mask: Tensor) -> int:
        """How many entries differ from the mask of the last round, and keep the new one instead.

        `mask` is bool, of the same shape in all rounds. In the first round 0, which `judge`
        does not count as a distance.
        """
        new = np.packbits(mask.reshape(-1).numpy(), bitorder="little")
        mismatched = 0
        if self._last_step is not None:
            old = self._masks[name].numpy()
            assert old.size == new.size
            for start in range(0, new.size, CHUNK):
                changed = new[start : start + CHUNK] ^ old[start : start + CHUNK]
                mismatched += int(BITS[changed].sum(dtype=np.int64))
        # A new tensor: the old one may be on its way into a checkpoint.
        self._masks[name] = torch.from_numpy(new)
        return mismatched

    def judge(self, successful_steps: int, mismatched: int, total: int, kept: int) -> Judgement:
        """End a round: push its distance into the queue, and say whether to draw.

        The integers are those of all pruned tensors on all stages: entries that differ,
        entries, kept entries of one mask. Draws if the queue is full and all of it is below
        the threshold.
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
        """What `restore` needs; later rounds do not change it."""
        return SearchState(dict(self._masks), list(self._queue), self._last_step)

    def restore(self, state: SearchState) -> None:
        """Go on where another search of the same settings stood after its last round."""
        self._masks = dict(state.masks)
        self._queue.clear()
        self._queue.extend(state.queue)
        self._last_step = state.last_step
