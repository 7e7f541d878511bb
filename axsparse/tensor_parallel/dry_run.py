"""The share of one tensor-parallel rank in a model, found by running its shards on the meta device.

Nothing is sent there; what a rank would send is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import mul
from typing import Any

import torch
from torch import Tensor

from axsparse.models.layer import Model
from axsparse.models.layer_cost import SAMPLES, Tracer
from axsparse.models.model_profile import ModelProfile, example_of, profile_layers
from axsparse.runtime.communication import Op, Sums, Work, shard_bounds
from axsparse.runtime.exchange import exchanged_bytes
from axsparse.runtime.grid import RankCoords
from axsparse.tensor_parallel.group import TensorGroup
from axsparse.tensor_parallel.modules import Sharding, sharded_loss


class SilentCollective:
    """A transport and its one group, of which only this rank is there. Nothing is sent, buffers
    stay as they are, operations are over at once, and their bytes are counted."""

    name = "silent"
    backoff = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.bytes_sent = self.started = self.largest = 0
        """The bytes and the number of operations, and the largest of their buffers."""

    def collective(self, _: str, ranks: Sequence[int]) -> SilentCollective:
        assert len(ranks) == self.size, "ranks of one group"
        return self

    def start(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> Work:
        limits = list(bounds or shard_bounds(buffer.numel(), self.size))
        self.bytes_sent += exchanged_bytes(op, limits, self.rank, buffer.itemsize)
        self.started += 1
        self.largest = max(self.largest, buffer.numel() * buffer.itemsize)
        return self

    def poll(self) -> bool:
        return True


class SilentGroup(TensorGroup):
    """The tensor-parallel ranks of a place, of which only this one is there. A `SumCounter`."""

    def __init__(self, coords: RankCoords, samples: int = SAMPLES) -> None:
        """Layers run on this many samples."""
        self._silent = SilentCollective(coords.tp_rank, coords.grid.g_tensor)
        transport: Any = self._silent
        super().__init__(coords, transport)
        self._samples = samples

    @property
    def largest(self) -> int:
        return self._silent.largest

    def begin(self) -> None:
        self._silent.bytes_sent = self._silent.started = self._silent.largest = 0
        self.fixed_bytes = 0

    def summed(self) -> Sums:
        sent, fixed = self._silent.bytes_sent, self.fixed_bytes
        return Sums((sent - fixed) // self._samples, self._silent.started, fixed)


def profile_of_tp_shard(
    model: Model, full: ModelProfile, coords: RankCoords, dtype: torch.dtype
) -> ModelProfile:
    """The profile of one rank's shard of a model: its parameters, compute and sums; `full` is the
    profile of the full model.

    Sharded parameters appear with the index of the shard, such as "block0.fc1.weight#1".
    ConfigError for a model that cannot be sharded so.
    """
    example = None if model.example is None else example_of(model.example, SAMPLES)
    # An example that is data has as many samples as a microbatch.
    samples = SAMPLES if example is None else len(example[0])
    group = SilentGroup(coords, samples)
    tracer = None if example is None else Tracer(example, dtype, group, samples=samples)
    layers = profile_layers(model.layers, tracer, Sharding(group))
    names = {parameter.name for layer in layers for parameter in layer.parameters}
    mark = f"#{coords.tp_rank}"
    ties = {
        f"{second}{end}": f"{first}{end}"
        for second, first in full.ties.items()
        for end in ("", mark)
        if f"{second}{end}" in names
    }
    profiled = replace(full, layers=layers, ties=ties)
    loss = sharded_loss(model, group)
    if loss is None or tracer is None or example is None:
        return profiled
    words = max(p.shape[0] for p in layers[-1].parameters if "#" in p.name)
    [(hidden, _), *_] = tracer.shapes
    logits = partial(mul, hidden[:-1].numel() // samples * words)
    sums = tracer.loss_sums(loss)
    return replace(profiled, loss_sums=sums, loss_logits=logits)
