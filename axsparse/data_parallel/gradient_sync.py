"""Sums a step's compressed gradients: over the two uses of a tied weight, then over replicas; and
gathers updated weights where replicas share the optimizer state.

There is one bucket for each layer. The layer's flat buffer of accumulated gradients itself is sent;
it is copied only if it is sent in another type. The way of a gradient:

1. The backward reports its layer as `ready`.
2. Once the backward is over, tied weights sum their two uses.
3. The bucket starts when its layer is ready, its ties are summed and all buckets before it have
   started.
4. The sum comes back into the buffer. Of exact sums, which are integers, gradients are made once
   all buckets are complete.

The order of the buckets is fixed (last layer first, layers with ties at the end), so that all
replicas start them alike. Where the optimizer state is sharded, a replica receives only the sums of
its share. A weight that two stages share goes through steps 2 to 4 in pieces, so that the stages
sum one piece while the replicas sum the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from axsparse.observe.phases import Phases
from axsparse.runtime.communication import Backoff, Collective, Op, Work
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.exchange import store_sum_in_rank_order
from axsparse.samo.layer_state import LayerState, StageTie

PIECE = 1 << 24
"""The most entries in a piece of a weight that two stages share. It is often the largest tensor,
and summing it in pieces halves the time that it takes after the backward."""


@dataclass
class _Bucket:
    """The gradient buffer of one layer, or a piece of it, on its way to the other replicas."""

    layer: LayerState
    part: range
    wire: Tensor | None = None
    """The copy that is sent; None if the gradient buffer itself is."""
    work: Work | None = None


@dataclass(eq=False)
class GradientSync:
    """Sums the gradients of one stage, layer by layer during the backward."""

    layers: Sequence[LayerState]
    """In model order."""
    ties: Sequence[StageTie]
    replicas: Collective
    wire_dtype: torch.dtype
    backoff: Backoff
    phases: Phases

    def __post_init__(self) -> None:
        self._tied = {id(use.layer) for tie in self.ties for use in tie.uses}
        backward = list(reversed(self.layers))
        self._order = sorted(backward, key=lambda layer: id(layer) in self._tied)
        self.begin()

    def begin(self) -> None:
        """Open a step, in which no layer is ready yet."""
        self._buckets = [
            _Bucket(layer, part) for layer in self._order for part in self._parts(layer)
        ]
        self._complete: set[int] = set()
        self._tie_works: list[tuple[LayerState, range, Work]] = []
        """The sums over two stages under way, and which entries of a layer they sum."""
        self._ties_begun = False
        self._started = 0
        self.own_extremes: list[Tensor] = []
        """The smallest and the largest gradient of each bucket on this replica, before the sum over
        replicas: they are finite if all its gradients were. Empty for a single replica, whose sums
        are its gradients, and for sums of integers."""

    def ready(self, layer: LayerState) -> None:
        """Start the sums that may start, now that all gradients of this layer are complete.

        Ties wait for `finish`: summing one may block this rank's GPU or host until the other
        stage joins in, and that stage may need what this backward has yet to send. ConfigError for
        a layer whose sum over replicas lacks a gradient that came after this was called.
        """
        if id(layer) in self._complete and self.replicas.size > 1:
            raise ConfigError(
                f"layer {layer.name}: a weight got another gradient after the replicas had begun "
                "to sum them, as where a reentrant checkpoint runs it several times; give the "
                "checkpoint use_reentrant=False"
            )
        self._complete.add(id(layer))
        self.advance()

    def advance(self) -> None:
        """Start the sums that may start and advance the running ones; never waits."""
        with self.phases("collective"):
            self._advance()

    def finish(self) -> None:
        """Wait until every gradient of this stage is summed over uses and replicas."""
        with self.phases("collective"):
            self.backoff.reset()
            self._start_ties()
            while not self._is_done():
                self._advance()
                if not self._is_done():
                    self.backoff.pause()
        with self.phases("optimizer"):
            for layer in self._order:
                layer.finish_gradient()

    @property
    def tie_bytes_sent(self) -> int:
        """Bytes sent to the other stage of a tie since the start."""
        pairs = {id(tie.pair): tie.pair for tie in self.ties if tie.pair is not None}
        return sum(pair.bytes_sent for pair in pairs.values())

    # -- the way of a gradient ------------------------------------------------------------

    def _advance(self) -> None:
        self._tie_works = [one for one in self._tie_works if not one[2].poll()]
        self._start_buckets()
        self._poll_buckets()

    def _start_ties(self) -> None:
        """Begin to sum the two uses of every tied weight, on this stage or on two."""
        for tie in self.ties:
            assert all(id(use.layer) in self._complete for use in tie.uses), "closed too early"
            if tie.pair is None:
                first, second = tie.uses
                store_sum_in_rank_order([first.sums, second.sums], first.sums)
            else:
                (use,) = tie.uses
                sums, offset = use.sums, use.tensor.offset
                for part in pieces(sums.numel()):
                    work = tie.pair.start(Op.ALL_REDUCE, sums[part.start : part.stop])
                    within = range(offset + part.start, offset + part.stop)
                    self._tie_works.append((use.layer, within, work))
        self._ties_begun = True

    def _parts(self, layer: LayerState) -> list[range]:
        """The pieces in which a layer is summed: one, unless another stage uses its weight too."""
        numel = layer.owned_sums.numel()
        waits = any(t.pair is not None and t.uses[0].layer is layer for t in self.ties)
        if not waits or layer.shares.is_sharded:
            return [range(numel)]
        return pieces(numel)

    def _start_buckets(self) -> None:
        """Start buckets in their order, up to the first that is not complete."""
        while self._started < len(self._buckets):
            bucket = self._buckets[self._started]
            if id(bucket.layer) not in self._complete or not self._ties_summed(bucket):
                break
            self._start(bucket)
            self._started += 1

    def _ties_summed(self, bucket: _Bucket) -> bool:
        if id(bucket.layer) not in self._tied:
            return True
        part = bucket.part
        return self._ties_begun and not any(
            layer is bucket.layer and within.start < part.stop and part.start < within.stop
            for layer, within, _ in self._tie_works
        )

    def _start(self, bucket: _Bucket) -> None:
        part = bucket.part
        gradient = bucket.layer.owned_sums[part.start : part.stop]
        if self.replicas.size == 1 or gradient.numel() == 0:
            return
        if not bucket.layer.is_exact:
            if gradient.dtype != self.wire_dtype:
                gradient = bucket.wire = gradient.to(self.wire_dtype)
            # This pass only reads, and takes a few per cent of the time of a norm.
            self.own_extremes += gradient.aminmax()
        if bucket.layer.shares.is_sharded:
            bucket.work = self.replicas.start(
                Op.REDUCE_SCATTER, gradient, bucket.layer.shares.bounds
            )
        else:
            bucket.work = self.replicas.start(Op.ALL_REDUCE, gradient)

    def _poll_buckets(self) -> None:
        """Copy the sums of the buckets that are complete into the gradient buffers."""
        for bucket in self._buckets[: self._started]:
            if bucket.work is not None and bucket.work.poll():
                if bucket.wire is not None:
                    # A sharded layer is one bucket, so its shares count from the bucket's start.
                    shares = bucket.layer.shares
                    summed = shares.held if shares.is_sharded else range(len(bucket.part))
                    gradient = bucket.layer.owned_sums[bucket.part.start :]
                    gradient[summed.start : summed.stop] = bucket.wire[summed.start : summed.stop]
                bucket.work = bucket.wire = None

    def _is_done(self) -> bool:
        return self._started == len(self._buckets) and all(
            bucket.work is None for bucket in self._buckets
        )


@dataclass(eq=False)
class WeightGather:
    """Gathers the updated weights of one stage, layer by layer while others are updated.

    Without shards, gradients are all-reduced. With shards (ZeRO stage 1, Rajbhandari et al. 2020),
    each replica receives the summed gradients of its share and updates it, and the kept
    half-precision weights are gathered afterwards. Both ways send the same number of bytes.
    """

    replicas: Collective
    backoff: Backoff
    phases: Phases
    _under_way: list[tuple[LayerState, Work]] = field(default_factory=list)

    def updated(self, layer: LayerState) -> None:
        """Send this replica's share of a layer, which is updated, and advance the running sends."""
        if not layer.shares.is_sharded or not layer.owned:
            return
        exchanged = layer.exchanged_weights
        layer.collect_weights(exchanged)
        with self.phases("collective"):
            work = self.replicas.start(Op.ALL_GATHER, exchanged, layer.shares.bounds)
            self._under_way.append((layer, work))
            self._advance()

    def restore(self, layers: Sequence[LayerState]) -> None:
        """Gather the weights of layers whose replicas hold none (ZeRO stage 3), where gradients
        have taken their memory."""
        for layer in layers:
            if layer.gathers and not layer.has_weights:
                self.updated(layer)
        self.finish()

    def finish(self) -> None:
        """Wait until all weights of the stage are the updated ones."""
        with self.phases("collective"):
            self.backoff.reset()
            while self._advance():
                self.backoff.pause()

    def _advance(self) -> int:
        while self._under_way and self._under_way[0][1].poll():
            layer, _ = self._under_way.pop(0)
            with self.phases("optimizer"):
                layer.store_weights()
        return len(self._under_way)


def pieces(numel: int) -> list[range]:
    """Ranges of at most `PIECE` that cover `numel` entries; one empty range if there are none."""
    return [range(start, min(start + PIECE, numel)) for start in range(0, max(numel, 1), PIECE)]
