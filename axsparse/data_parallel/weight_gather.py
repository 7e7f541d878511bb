"""Gathers updated weights from all replicas, after an update of sharded optimizer state.

Without shards, gradients are all-reduced. With shards (ZeRO stage 1, Rajbhandari et al. 2020),
each replica receives the summed gradients of its own share and updates it, and the kept
half-precision weights are gathered afterwards. Both ways send the same number of bytes.
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
        """Send this replica's share of a layer, which is updated, and push what is under way."""
        if not layer.shares.is_sharded or not layer.owned:
            return
        layer.collect_weights()
        with self._phases("collective"):
            work = self._replicas.start(Op.ALL_GATHER, layer.exchanged_weights, layer.shares.bounds)
            self._under_way.append((layer, work))
            self._advance()

    def finish(self) -> None:
        """Wait until all weights of the stage are the updated ones."""
        with self._phases("collective"):
            self._backoff.reset()
            while self._advance():
                self._backoff.pause()

    def _advance(self) -> int:
        """Expand the layers that have arrived; returns how many are still under way."""
        while self._under_way and self._under_way[0][1].poll():
            layer, _ = self._under_way.pop(0)
            with self._phases("optimizer"):
                layer.expand_weights()
        return len(self._under_way)
