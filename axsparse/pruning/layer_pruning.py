"""Prunes one layer: gathers statistics of its matrices' inputs, draws their masks, and puts the
kept entries into its weights.

`input_statistics` has the methods that look at inputs, of whatever multiplies by a weight. A score
of the user's own may decide by the norms that Wanda gathers (`criteria.Score`), and methods that
look at weights alone gather nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from axsparse.models.layer import StartValues, Ties
from axsparse.models.start_weights import some_of
from axsparse.pruning.criteria import Criterion
from axsparse.pruning.healing import FITTED, KEPT, MASK, changed_value
from axsparse.pruning.input_statistics import (
    METHODS,
    STATISTICS,
    HowMany,
    Method,
    ProductStatistics,
    WatchedProducts,
)
from axsparse.pruning.targets import Targets, of_all_numbers, to_exclude
from axsparse.runtime.errors import ConfigError, TrainingError
from axsparse.samo.layer_construction import BuiltLayer
from axsparse.samo.masks import Shape, Weight
from axsparse.samo.selection import pack, unpack

WITHOUT_INPUTS = "choose pruning.method: magnitude without pruning.heal"
"""The suggestion that helps whatever the layers are."""
WITHOUT_HEALING = "leave pruning.heal out"


@dataclass(frozen=True)
class CalibratedMasks:
    """The masks of this stage's matrices, in one bit an entry, and the weights that stay."""

    kept: Mapping[str, int]
    """The number of kept entries of each matrix, of all stages."""
    start: StartValues | None
    drawn: dict[str, Tensor] = field(default_factory=dict)
    """Masks and changed weights, by the names that they have in the file of a healed layer."""
    unmet: list[str] = field(default_factory=list)
    """The matrices of experts that no token of the samples met."""
    losses: list[float] = field(default_factory=list)
    """On the last stage: the mean loss of a target before and after, over the held-out samples."""

    @property
    def changes_weights(self) -> bool:
        """Whether the model starts from other weights than before it was pruned."""
        return any(not key.startswith(MASK) for key in self.drawn)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the start values before pruning."""
        return "" if self.start is None else self.start.fingerprint

    def read(self, name: str) -> Tensor | None:
        """The start value of a parameter or buffer, changed if pruning has changed it."""
        assert self.start is not None, "only loaded weights are changed"
        value = self.start.read(name)
        if value is None or not {f"{KEPT}{name}", f"{FITTED}{name}"} & self.drawn.keys():
            return value
        return changed_value(name, value, self.drawn, self.drawn.__getitem__)

    def mask(self, name: str, shape: Shape, weight: Weight, within: Tensor | None = None) -> Tensor:
        del weight
        assert within is None, name
        return unpack(self.drawn[f"{MASK}{name}"], torch.Size(shape).numel())


@dataclass(frozen=True)
class LayerPruning:
    """The settings that decide the masks of a layer."""

    method: str
    """One of `input_statistics.STATISTICS`, or a method that looks at weights alone."""
    targets: Targets
    criterion: Criterion
    """The criterion of the masks if its score is custom and takes inputs. Its pattern, if it has
    one, replaces sparsities."""
    ties: Ties
    apart: Collection[str] = ()
    """Tensors that are known not to be multiplied by in their layers: embeddings that are looked
    up, and a head by which the loss multiplies."""

    def check(self) -> None:
        """ConfigError for matrices whose inputs decide in no product, or in two layers."""
        pruned = self.targets.shapes
        twice = [name for name in pruned if name in {*self.ties, *self.ties.values()}]
        stacks = self.targets.stacks if self.method in METHODS else ()
        seen = {name for name, shape in pruned.items() if len(shape) == 2 or name in stacks}
        seen -= {*self.apart}
        unseen = [name for name in pruned if self._sees_inputs and name not in seen.union(twice)]
        if odd := [*twice, *unseen]:
            whys = {"two have": twice, "none has": unseen}
            said = ", ".join(f"{why} {some_of(names)}" for why, names in whys.items() if names)
            fit, own = pruned.keys() - odd, self.targets.own
            why, otherwise = "pruning.heal: fits a matrix in its one layer", WITHOUT_HEALING
            if self._sees_inputs:
                by = "scores a matrix by the inputs of its linear layer"
                why, otherwise = f"pruning.method: {self.method} {by}", WITHOUT_INPUTS
            raise ConfigError(f"{why}, and {said}; {to_exclude(odd, pruned, fit, otherwise, own)}")

    def gathered(
        self, built: BuiltLayer, method: Method, pass_samples: Callable[[], None]
    ) -> dict[str, ProductStatistics]:
        """The statistics of the pruned matrices of one layer, by name.

        `pass_samples` runs the layer on the inputs that decide; it is called if any do.
        TrainingError where they are not finite.
        """
        dims = self.targets.input_dims
        gathered = {
            it.name: ProductStatistics(method, it.name, it.parameter.detach(), dims.get(it.name, 1))
            for it in built.state.owned
            if it.name in self.targets.shapes
        }
        if gathered:
            with WatchedProducts(gathered.values()):
                pass_samples()
            for one in gathered.values():
                one.check()
        return gathered

    def draw(
        self, built: BuiltLayer, pass_samples: Callable[[], None], masks: CalibratedMasks
    ) -> None:
        """Draw the masks of one layer and put them into its weights; `pass_samples` runs it on the
        inputs that decide."""
        gathered: dict[str, ProductStatistics] = {}
        if self._sees_inputs:
            gathered = self.gathered(built, STATISTICS[self.method], pass_samples)
        unmet = {name: one.unmet for name, one in gathered.items()}
        unseen = [
            name for name, none in unmet.items() if len(none) == self.targets.matrices(name)[0]
        ]
        if unseen:
            pruned, alike = self.targets.shapes, {*map(of_all_numbers, unseen)}
            # Matrices of other layers are likely to be as those here.
            others = {name for name in pruned if of_all_numbers(name) not in alike}
            fit = others | (gathered.keys() - unseen)
            raise ConfigError(
                f"pruning.method: {self.method} scores a matrix by the inputs of its layer, and "
                f"nothing multiplies by {some_of(unseen)} there; "
                + to_exclude(unseen, pruned, fit, WITHOUT_INPUTS, self.targets.own)
            )
        masks.unmet.extend(name for none in unmet.values() for name in none)
        for tensor in built.state.owned:
            if tensor.name in self.targets.shapes:
                before = built.state.dense_master(tensor.name).to(tensor.parameter.device)
                self._prune(
                    tensor.name, tensor.parameter, before, gathered.pop(tensor.name, None), masks
                )

    def _prune(
        self,
        name: str,
        weight: Tensor,
        before: Tensor,
        statistics: ProductStatistics | None,
        masks: CalibratedMasks,
    ) -> None:
        """Draw the mask of a matrix and put its kept entries into `weight`; what it takes is
        freed."""
        if self.criterion.sees_inputs or statistics is None:
            criterion = replace(self.criterion, input_dims=self.targets.input_dims)
            if statistics is not None:
                assert callable(criterion.score)
                score = partial(criterion.score, inputs=statistics.norms.cpu())
                criterion = replace(criterion, score=score)
            shape = tuple(before.shape)
            mask = criterion.mask(name, shape, before.cpu, masks.kept[name])
            mask = mask.view(shape).to(before.device)
            after = before * mask
        else:
            try:
                mask, after = statistics.prune(before, self._how_many(name))
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                raise TrainingError(
                    f"{name}: the moments of its inputs have no Cholesky factor in torch.float32; "
                    "choose pruning.method: wanda, or other texts"
                ) from None
        masks.drawn[f"{MASK}{name}"] = pack(mask.cpu().reshape(-1))
        weight.copy_(after)
        if statistics is not None and statistics.changes_weights:
            # Indices of two dimensions take less memory than a stack's three.
            masks.drawn[f"{KEPT}{name}"] = after.flatten(0, -2)[mask.flatten(0, -2)].cpu()

    @property
    def _sees_inputs(self) -> bool:
        return self.method in METHODS or self.criterion.sees_inputs

    def _how_many(self, name: str) -> HowMany:
        if self.criterion.pattern is not None:
            return self.criterion.pattern
        return self.targets.own.get(name, self.targets.sparsity)
