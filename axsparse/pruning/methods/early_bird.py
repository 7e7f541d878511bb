"""The Early-Bird search: the network stays dense until the mask of highest scores settles."""

from __future__ import annotations

from functools import partial

import torch

from axsparse.pruning.criteria import Criterion
from axsparse.pruning.mask_distance import Judgement, MaskConvergence, SearchState
from axsparse.pruning.methods.live_masks import LiveMasks, ScoredMasks
from axsparse.pruning.methods.masking import Change, MaskingState, MethodState, Moment, Read
from axsparse.runtime.errors import DataError, TrainingError, everywhere

KIND = "search"
"""The kind under which the masks are saved."""


class EarlyBirdSearch:
    """Draws a mask at intervals of successful steps, and prunes once `search` finds it settled."""

    def __init__(
        self,
        live: LiveMasks,
        criterion: Criterion,
        search: MaskConvergence,
        *,
        fails_undrawn: bool,
    ) -> None:
        """If no mask settles, `fails_undrawn` ends the run; else the last mask is taken."""
        self._live = live
        self._criterion = criterion
        self.search = search
        self._fails = fails_undrawn
        self._is_done = False

    @property
    def unfinished(self) -> str | None:
        if self._is_done:
            return None
        return (
            "early-bird drew no mask: skipped steps do not count, and those that did were over "
            "before pruning.until_step; train longer, or search shorter"
        )

    def before_step(self, now: Moment) -> Change | None:
        if self._is_done or not self.search.due(now.updates):
            return None
        masks = self._live.masks(self._criterion, lambda final: final)
        judged = self._judge(masks, now.updates)
        figures = {
            name: value
            for name, value in (("churn", judged.churn), ("hamming", judged.hamming))
            if value is not None
        }
        said = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        if judged.outcome == "search":
            return Change(f"early-bird looks: {said or 'first mask'}", figures, changed=False)
        if judged.outcome == "exhausted" and self._fails:
            raise everywhere(
                TrainingError(
                    f"step {now.step}: early-bird: no mask has settled by pruning.until_step "
                    f"(last: {said}, pruning.threshold is above); search longer, raise the "
                    "threshold, or set pruning.undrawn to draw"
                )
            )
        self._is_done = True
        self._live.prune(masks)
        how = "draws" if judged.outcome == "draw" else "draws an unsettled mask"
        return Change(
            f"early-bird {how}: {said}",
            {**figures, **self._live.figures()},
            is_ticket=True,
        )

    def _judge(self, masks: ScoredMasks, updates: int) -> Judgement:
        """Compare these masks with those of the last look, over all stages."""
        live = self._live
        counts = torch.zeros(3, dtype=torch.int64)
        for owner, state, tensor in live.counted():
            shape = live.targets.shapes[owner]
            mask = masks.mask(owner, shape, partial(state.dense_master, tensor.name))
            mismatched = self.search.compare(owner, mask)
            counts += torch.tensor([mismatched, mask.numel(), int(mask.sum())])
        return self.search.judge(updates, *live.total(counts).tolist())

    def state(self) -> MaskingState:
        if self._is_done:
            return MaskingState(MethodState(is_done=True))
        found = self.search.state()
        standing = MethodState(distances=tuple(found.queue), last_look=found.last_step)
        return MaskingState(standing, {KIND: found.masks})

    def restore(self, standing: MethodState, read: Read) -> None:
        self._is_done = standing.is_done
        masks = {}
        if standing.last_look is not None:
            for owner, _, tensor in self._live.counted():
                masks[owner] = read(KIND, owner)
                if masks[owner].shape != (-(-tensor.parameter.numel() // 8),):
                    raise DataError(
                        f"checkpoint: the early-bird mask of {owner} has {masks[owner].numel()} "
                        f"bytes, which do not fit {tensor.parameter.numel()} entries; resume from "
                        "another checkpoint"
                    )
        queue = list(standing.distances)
        self.search.restore(SearchState(masks, queue, standing.last_look))
