"""The share of each tensor-parallel rank in a model, at any degree (`layout.g_tensor`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from axsparse.config.schema import Config
from axsparse.models.layer import Model
from axsparse.models.model_profile import ModelProfile
from axsparse.models.tensor_shard import TensorShard
from axsparse.runtime.grid import Grid
from axsparse.samo.precision import DTYPES
from axsparse.tensor_parallel.dry_run import profile_of_tp_shard
from axsparse.tensor_parallel.plan import check_plan, shards_of


@dataclass(frozen=True)
class Cutting:
    """A model that can be sharded, as a configuration asks for it."""

    config: Config
    model: Model
    profile: ModelProfile
    """The survey of the full model."""
    _profiles: dict[int, ModelProfile] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def shards(self, g_tensor: int) -> dict[str, TensorShard]:
        """The last shard of each sharded parameter, by global name; empty for one rank.

        ConfigError for a number of ranks that does not divide what is sharded, and for what does
        not work with shards.
        """
        if g_tensor == 1:
            return {}
        fuses = self.config.pipeline.compile is True
        where = self.config.where("layout.g_tensor")
        check_plan(self.model.layers, self.model.name, where, fuses=fuses)
        found: dict[str, TensorShard] = {}
        for layer, info in zip(self.model.layers, self.profile.layers, strict=True):
            shapes = {layer.local_name(p.name): p.shape for p in info.parameters}
            of_layer = shards_of(layer, shapes, g_tensor - 1, g_tensor, where)
            found.update((layer.full_name(name), shard) for name, shard in of_layer.items())
        return found

    def tp_shard(self, g_tensor: int) -> ModelProfile:
        """The survey of the last rank, which holds most: of a vocabulary that does not divide it
        has the larger part. ConfigError as `shards`."""
        if g_tensor not in self._profiles:
            found = self.profile
            if self.shards(g_tensor):
                last = Grid(1, 1, g_tensor).coords(g_tensor - 1)
                dtype = DTYPES[self.config.precision]
                found = profile_of_tp_shard(self.model, self.profile, last, dtype)
            self._profiles[g_tensor] = found
        return self._profiles[g_tensor]

    def kept_of_tp_shard(self, g_tensor: int, kept: Mapping[str, int]) -> dict[str, int]:
        """Kept entries of each pruned tensor on the last tensor-parallel rank, rounded up, if
        `kept` of the full tensors is spread evenly over shards. In a run the thresholds of masks
        decide."""
        shapes, found = self.profile.shapes, {}
        for parameter in (p for layer in self.tp_shard(g_tensor).layers for p in layer.parameters):
            full, _, _ = parameter.name.partition("#")
            if full in kept:
                of_all = kept[full] * parameter.numel
                found[parameter.name] = -(-of_all // math.prod(shapes[full]))
        return found
