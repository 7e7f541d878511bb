"""The share of one tensor-parallel rank in a model, found by running its shards on the meta device.

Nothing is sent there; what a rank would send is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import mul
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from axsparse.models.layer import Model
from axsparse.models.layer_cost import SAMPLES, Tracer
from axsparse.models.model_profile import ModelProfile, example_of, profile_layers
from axsparse.runtime.communication import Op, Sums, shard_bounds
from axsparse.runtime.exchange import exchanged_bytes
from axsparse.runtime.grid import RankCoords
from axsparse.tensor_parallel.group import TensorGroup
from axsparse.tensor_parallel.modules import Sharding, sharded_loss


class SilentGroup(TensorGroup):
    """The tensor-parallel ranks of a place, of which only this one is there: nothing is sent,
    buffers stay as they are, and what would be sent is counted. A `SumCounter`."""

    bytes_sent = largest = 0

    def __init__(self, coords: RankCoords, samples: int = SAMPLES) -> None:
        """Layers run on this many samples."""
        transport: Any = SimpleNamespace(backoff=None, collective=lambda _, ranks: ranks)
        super().__init__(coords, transport)
        self._samples = samples
        self.begin()

    def begin(self) -> None:
        self.bytes_sent = self.largest = self.fixed_bytes = self._started = 0

    def summed(self) -> Sums:
        fixed = self.fixed_bytes
        return Sums((self.bytes_sent - fixed) // self._samples, self._started, fixed)

    def _exchange(self, op: Op, buffer: Tensor, bounds: Sequence[int] | None = None) -> None:
        limits = list(bounds or shard_bounds(buffer.numel(), self.size))
        self.bytes_sent += exchanged_bytes(op, limits, self.rank, buffer.itemsize)
        self.largest = max(self.largest, buffer.nbytes)
        self._started += 1


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
