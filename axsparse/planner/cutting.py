"""The share of each tensor-parallel rank in a model, at any degree (`layout.g_tensor`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from axsparse.config.schema import Config
from axsparse.models.layer import Model
from axsparse.models.survey import Survey
from axsparse.models.tensor_shard import TensorShard
from axsparse.runtime.grid import Grid
from axsparse.samo.precision import DTYPES
from axsparse.tensor_parallel.dry_run import survey_of_member
from axsparse.tensor_parallel.plan import check_plan, shards_of


@dataclass(frozen=True)
class Cutting:
    """A model that can be sharded, as a configuration asks for it."""

    config: Config
    model: Model
    survey: Survey
    """The survey of the full model."""
    _surveys: dict[int, Survey] = field(default_factory=dict, init=False, repr=False, compare=False)

    def shards(self, members: int) -> dict[str, TensorShard]:
        """The last shard of each sharded parameter, by global name; empty for one rank.

        ConfigError for a number of ranks that does not divide what is sharded, and for what does
        not work with shards.
        """
        if members == 1:
            return {}
        fuses = self.config.pipeline.compile is True
        where = self.config.where("layout.g_tensor")
        check_plan(self.model.layers, self.model.name, where, fuses=fuses)
        found: dict[str, TensorShard] = {}
        for layer, info in zip(self.model.layers, self.survey.layers, strict=True):
            shapes = {layer.local_name(p.name): p.shape for p in info.parameters}
            of_layer = shards_of(layer, shapes, members - 1, members, where)
            found.update((layer.full_name(name), shard) for name, shard in of_layer.items())
        return found

    def of_member(self, members: int) -> Survey:
        """The survey of the last rank, which holds most: of a vocabulary that does not divide it
        has the larger part. ConfigError as `shards`."""
        if members not in self._surveys:
            found = self.survey
            if self.shards(members):
                last = Grid(1, 1, members).place(members - 1)
                dtype = DTYPES[self.config.precision]
                found = survey_of_member(self.model, self.survey, last, dtype)
            self._surveys[members] = found
        return self._surveys[members]

    def kept_of_member(self, members: int, kept: Mapping[str, int]) -> dict[str, int]:
        """Kept entries of each pruned tensor on the last tensor-parallel rank, rounded up, if
        `kept` of the full tensors is spread evenly over shards. In a run the thresholds of masks
        decide."""
        shapes, found = self.survey.shapes, {}
        for parameter in (p for layer in self.of_member(members).layers for p in layer.parameters):
            full, _, _ = parameter.name.partition("#")
            if full in kept:
                of_all = kept[full] * parameter.numel
                found[parameter.name] = -(-of_all // math.prod(shapes[full]))
        return found
