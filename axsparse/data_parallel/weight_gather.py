"""After an update of sharded optimizer state: every replica's kept weights to all others.

The second half of what is an all-reduce of gradients otherwise (ZeRO stage 1, Rajbhandari
et al. 2020): gradients were reduced to the replicas that answer for them, and the kept
half-precision weights are gathered from there. So the same bytes travel.
"""

from __future__ import annotations

from axsparse.observe.phases import Phases
from axsparse.runtime.communication import Backoff, Collective, Op, Work
from axsparse.samo.layer_state import LayerState


class WeightGather:
    """Gathers the updated weights of one stage, layer by layer while others are updated."""

    def __init__(self, replicas: Collective, backoff: Backoff, phases: Phases) -> None:
        self._replicas = replicas
        self._backoff = backoff
        self._phases = phases
        self._under_way: list[tuple[LayerState, Work]] = []

    def updated(self, layer: LayerState) -> None:
        """What this replica holds of a layer is updated: send it, and push what is under way."""
        if not layer.is_sharded or not layer.owned:
            return
        layer.collect_weights()
        with self._phases("collective"):
            work = self._replicas.start(Op.ALL_GATHER, layer.exchanged_weights, layer.bounds)
            self._under_way.append((layer, work))
            self._advance()

    def finish(self) -> None:
        """Wait until all weights of the stage are the updated ones."""
        with self._phases("collective"):
            self._backoff.reset()
            while self._advance():
                self._backoff.pause()

    def _advance(self) -> int:
        """Expand what has come; returns how many layers are still under way."""
        while self._under_way and self._under_way[0][1].poll():
            layer, _ = self._under_way.pop(0)
            with self._phases("optimizer"):
                layer.expand_weights()
        return len(self._under_way)
