"""Into how many chunks the tensors of a run are cut (`layout.g_tensor`), which tensors they are,
and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from axsparse.config.load import LoadedConfig
from axsparse.models.layer import Model
from axsparse.models.survey import Survey, survey_of_member
from axsparse.models.tensor_group import Cut
from axsparse.models.tensor_parallel import cuts_of, most_chunks
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid
from axsparse.samo.precision import DTYPES


@dataclass(frozen=True)
class Cutting:
    """A model that can be cut for several members, as a configuration asks for it."""

    loaded: LoadedConfig
    model: Model
    survey: Survey
    """That of the whole model."""
    _surveys: dict[int, Survey] = field(default_factory=dict, init=False, repr=False, compare=False)

    def is_needed(self, members: int) -> bool:
        """Whether layers are cut at all: for several members, or for one under
        `layout.tensor_exact`."""
        return members > 1 or self.loaded.config.layout.tensor_exact

    def cuts(self, members: int) -> dict[str, Cut]:
        """How parameters are cut into chunks, by global name; empty where layers are whole.

        ConfigError for a number of members that does not divide what is cut, and for what does not
        work with tensors that are cut.
        """
        if not self.is_needed(members):
            return {}
        self._refuse(members)
        where, chunks = self._where(members), members
        shapes = {
            layer.name: {p.name.removeprefix(f"{layer.name}."): p.shape for p in layer.parameters}
            for layer in self.survey.layers
        }
        if self.loaded.config.layout.tensor_exact:
            chunks = min(
                most_chunks(layer.name, layer.tensor, shapes[layer.name])
                for layer in self.model.layers
            )
            if chunks % members:
                raise ConfigError(
                    f"{where}: {members}, but layout.tensor_exact cuts this model into {chunks} "
                    f"chunks; choose at most {chunks}"
                )
        found: dict[str, Cut] = {}
        for layer in self.model.layers if chunks > 1 else ():
            of_layer = cuts_of(layer.name, layer.tensor, shapes[layer.name], chunks, where)
            found.update((f"{layer.name}.{name}", cut) for name, cut in of_layer.items())
        return found

    def of_member(self, members: int) -> Survey:
        """The survey of the last member, which holds most: of a vocabulary that does not divide it
        has the larger part. ConfigError as `cuts`."""
        if members not in self._surveys:
            cuts = self.cuts(members)
            chunks = next((cut.chunks for cut in cuts.values()), 1)
            self._surveys[members] = self.survey
            if cuts:
                dtype = DTYPES[self.loaded.config.precision]
                # A vocabulary that does not divide leaves the last member one word more.
                last = Grid(1, 1, members).place(members - 1)
                found = survey_of_member(self.model, self.survey, last, chunks, dtype)
                self._surveys[members] = found
        return self._surveys[members]

    def kept_of_member(self, members: int, kept: Mapping[str, int]) -> dict[str, int]:
        """How many entries of each pruned tensor the last member keeps, rounded up, if those of the
        whole tensors, `kept`, are spread evenly over chunks. In a run the thresholds of masks
        decide."""
        shapes, found = self.survey.shapes, {}
        for parameter in (p for layer in self.of_member(members).layers for p in layer.parameters):
            whole, _, _ = parameter.name.partition("#")
            if whole in kept:
                of_all = kept[whole] * parameter.numel
                found[parameter.name] = -(-of_all // math.prod(shapes[whole]))
        return found

    def _where(self, members: int) -> str:
        """The setting that asks for chunks."""
        return self.loaded.where("layout.tensor_exact" if members == 1 else "layout.g_tensor")

    def _refuse(self, members: int) -> None:
        """ConfigError for what does not work with tensors that are cut."""
        config, model = self.loaded.config, self.model
        refused = {
            f"{members} is no power of two": bool(members & (members - 1)),
            f"model {model.name} names no modules to cut (Layer.tensor)": not any(
                layer.tensor for layer in model.layers
            ),
            "pipeline.compile fuses layers, which are not cut then": config.pipeline.compile,
        }
        for reason, is_refused in refused.items():
            if is_refused:
                raise ConfigError(
                    f"{self._where(members)}: {reason}; choose another value there, or "
                    "layout.g_tensor 1 without layout.tensor_exact"
                )


def ties_of_chunks(survey: Survey, cuts: Mapping[str, Cut]) -> dict[str, str]:
    """The ties of the chunks of tied tensors that are cut; ConfigError where one alone is."""
    ties = {}
    for second, first in survey.ties.items():
        if cuts.get(first) != cuts.get(second):
            raise ConfigError(
                f"tie {first} = {second}: the two uses are not cut alike (Layer.tensor); cut both "
                "by vocabulary, or neither"
            )
        for number in range(cuts[first].chunks if first in cuts else 0):
            ties[f"{second}#{number}"] = f"{first}#{number}"
    return ties
