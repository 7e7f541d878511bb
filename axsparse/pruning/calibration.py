"""Draws masks from what each layer gets as input, one layer at a time, before state is built.

Calibration samples pass through the stages once. A stage has its samples' activations and one
layer: it runs the layer on all samples to gather statistics, prunes the layer's matrices, and runs
it again to make the inputs of the next layer. The last activations of a stage travel to the next
one. Every replica does the same by itself, so that masks depend neither on the number of stages nor
on that of replicas. `input_statistics` has the methods; a score of the user's own may decide by the
norms that Wanda gathers (`criteria.Score`).

With a `Fit` the samples also pass through the layers as they were, and each pruned layer is fitted
to what the dense one puts out, before the next layer is pruned (`healing`); the last pruned layer
of the model is then fitted by the loss. The samples' targets travel behind the activations, since
any stage may have that layer. Other samples pass behind them by both ways, for the losses before
and after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from axsparse.data.batches import Batch, Microbatch
from axsparse.models.layer import Layer, StartValues, as_tuple, on_meta
from axsparse.models.module_products import forwards_in_place
from axsparse.models.start_weights import some_of
from axsparse.pruning.criteria import Criterion
from axsparse.pruning.expert_statistics import ExpertProducts, ExpertStatistics
from axsparse.pruning.healing import (
    FITTED,
    KEPT,
    MASK,
    Errors,
    Fit,
    HealedLayers,
    relative_error,
)
from axsparse.pruning.input_statistics import (
    METHODS,
    STATISTICS,
    Convolution,
    HowMany,
    InputStatistics,
    PatchStatistics,
    WandaStatistics,
)
from axsparse.pruning.targets import Targets
from axsparse.runtime.bounds import telling_sample
from axsparse.runtime.canonical_form import canonical
from axsparse.runtime.communication import Direction, Link, Message, Transport
from axsparse.runtime.errors import ConfigError, noted
from axsparse.runtime.grid import Place
from axsparse.runtime.seeds import preserved_rng, seed_all
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, build_layers
from axsparse.samo.masks import Shape, Weight
from axsparse.samo.selection import Bits
from axsparse.samo.shards import ALONE

Tensors = tuple[Tensor, ...]
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
Multiplying: TypeAlias = "nn.Linear | Convolution"
"""A module that multiplies its inputs with a weight."""
SECONDS = 5.0
"""The shortest time between two lines that say how far the calibration is."""


@dataclass(frozen=True)
class CalibratedMasks:
    """The masks of this stage's matrices, in one bit an entry, and the weights that stay."""

    kept: Mapping[str, int]
    """The number of kept entries of each matrix, of all stages."""
    start: StartValues | None
    """The values that the model starts from."""
    bits: dict[str, Bits] = field(default_factory=dict)
    kept_weights: dict[str, Tensor] = field(default_factory=dict)
    """The kept weights of the matrices that pruning has changed, in the precision of the run, or
    in fp32 where they were fitted."""
    fitted: dict[str, Tensor] = field(default_factory=dict)
    """The fp32 values of parameters that are not pruned and were fitted."""
    unmet: list[str] = field(default_factory=list)
    """The matrices of experts that no token of the samples met."""
    losses: list[float] = field(default_factory=list)
    """On the last stage: the mean loss of a target before and after, over the judged samples."""

    @property
    def changes_weights(self) -> bool:
        """Whether the model starts from other weights than before it was pruned."""
        return bool(self.kept_weights or self.fitted)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the start values before pruning."""
        return "" if self.start is None else self.start.fingerprint

    def read(self, name: str) -> Tensor | None:
        """The start value of a parameter or buffer, changed if pruning has changed it."""
        assert self.start is not None, "only loaded weights are changed"
        value = self.start.read(name)
        if value is not None and name in self.fitted:
            return self.fitted[name]
        if value is None or name not in self.kept_weights:
            return value
        mask_D, kept_K = self.bits[name].mask(), self.kept_weights[name]
        changed_D = torch.zeros(mask_D.shape, dtype=kept_K.dtype).masked_scatter_(mask_D, kept_K)
        return changed_D.view(value.shape)

    def mask(self, name: str, shape: Shape, weight: Weight, within: Tensor | None = None) -> Tensor:
        del weight
        assert within is None and self.bits[name].numel == torch.Size(shape).numel(), name
        return self.bits[name].mask()


@dataclass(frozen=True)
class Calibration:
    """What decides the masks, and the stage that this rank is."""

    method: str
    """One of `input_statistics.STATISTICS`; with a fit also one that looks at weights alone."""
    targets: Targets
    criterion: Criterion
    """Its score decides if that is the user's own and takes inputs. Its pattern, if it has one,
    replaces sparsities."""
    layers: Sequence[Layer]
    """The layers of this stage."""
    pruned: Sequence[str]
    """The names of all layers of which something is pruned, in order; the last one is fitted by the
    loss as well."""
    ties: Mapping[str, str]
    options: StateOptions
    place: Place
    transport: Transport
    loss: Callable[[Microbatch, Tensor, Tensors], Tensor]
    """Gives the summed loss of a microbatch, from its targets and the outputs of the last layer."""
    samples: Sequence[Microbatch]
    """The calibration samples in microbatches; stages behind the first have them without inputs."""
    judged: Batch
    """The samples of which the loss is computed before and after; nothing is made of them else."""
    says: Callable[[str], None] = lambda _: None
    """Shows the user a line about how far the calibration is."""
    fit: Fit | None = None
    """How pruned layers are fitted to the dense ones; None leaves them as they were pruned."""
    num_targets: Sequence[int] = ()
    """The number of targets in each microbatch of samples, on the first stage."""
    behind: Sequence[Layer] = ()
    """The layers of the model behind the last one of which something is pruned."""
    healed: HealedLayers | None = None
    """Where layers are kept that are done, for a start that goes on; None keeps none."""
    forgets: bool = False
    """Whether what is kept there leaves the memory, since no state is built of it."""

    def check(self) -> None:
        """ConfigError for a matrix of this stage whose inputs no linear layer sees, or two see,
        and for a model that is to be healed and was never trained."""
        if self.fit is not None and self.options.start is None:
            raise ConfigError(
                "pruning.heal: layers are fitted to what they put out as they were loaded, and "
                "this model starts from drawn values; load weights (model.from, model.weights or "
                "start_from), or leave pruning.heal out"
            )
        twice = {*self.ties, *self.ties.values()} & {*self.targets.shapes}
        if twice:
            raise ConfigError(
                f"pruning.method: {self.method} scores a matrix by the inputs of its layer, and "
                f"{min(twice)} is used in two; name it in pruning.exclude"
            )
        if not self._sees_inputs:
            return
        for layer in self.layers:
            module = layer.build() if layer.init is None else on_meta(layer)
            seen = {*self._weights(layer.name, module), *self._stacks}
            for parameter, _ in module.named_parameters():
                name = f"{layer.name}.{parameter}"
                if name in self.targets.shapes and name not in seen:
                    also = " or a convolution" if self.criterion.sees_inputs else ""
                    raise ConfigError(
                        f"pruning.method: {self.method} scores a matrix by the inputs of a linear "
                        f"layer{also}, and {name} is of none; name it in pruning.exclude"
                    )

    def draw(self) -> CalibratedMasks:
        """The masks; all ranks call this together."""
        masks = CalibratedMasks(self._kept(), self.options.start)
        branch = self.transport.branch()
        link = branch.link(self.place)
        # What is judged also passes through the layers as they were, and all samples do where
        # layers are fitted.
        both = self._passing
        again = both if self.fit is not None else self.judged.microbatches
        fitted = self.samples if self.fit is not None else ()
        if self.place.is_first:
            flow = [self._prepared(each.inputs) for each in (*both, *again)]
            flow += [self._targets_of(number) for number in range(len(fitted))]
        else:
            flow = self._received(link, len(both) + len(again) + len(fitted))
        pruned, dense = flow[: len(both)], flow[len(both) : len(both) + len(again)]
        targets = flow[len(both) + len(again) :]
        with torch.no_grad():
            progress = Progress(self.says)
            for number, layer in enumerate(self.layers):
                progress.show(
                    f"{self.method}: stage {self.place.stage}, layer {number + 1} of "
                    f"{len(self.layers)}, {len(self.samples)} microbatches of samples"
                )
                self._pass(layer, pruned, dense, targets, masks)
            if masks.unmet:
                self.says(
                    f"{self.method}: no token of the samples met {len(masks.unmet)} matrices of "
                    f"experts, which are pruned by magnitude: {some_of(masks.unmet)}"
                )
            if self.place.is_last:
                masks.losses.extend(map(self._mean_loss, (dense, pruned)))
        if not self.place.is_last:
            for number, tensors in enumerate((*pruned, *dense, *targets)):
                link.send(Message(Direction.FORWARD, number, tensors))
        branch.close()  # and its link, once all is sent
        return masks

    @property
    def _passing(self) -> Sequence[Microbatch]:
        """What passes through the pruned layers, in order."""
        return (*self.samples, *self.judged.microbatches)

    def _mean_loss(self, flow: Sequence[Tensors]) -> float:
        """The mean loss of a target of the judged samples, which are the last of a flow."""
        judged = self.judged.microbatches
        outputs = flow[len(flow) - len(judged) :]
        losses = []
        for each, given in zip(judged, outputs, strict=True):
            assert each.targets is not None, "the last stage reads targets"
            losses.append(float(self.loss(each, each.targets, given)))
        return math.fsum(losses) / self.judged.num_targets if self.judged.num_targets else math.nan

    def _pass(
        self,
        layer: Layer,
        flow: list[Tensors],
        dense: list[Tensors],
        targets: Sequence[Tensors],
        masks: CalibratedMasks,
    ) -> None:
        """Draw the masks of one layer, and replace its inputs in `flow` by its outputs, and those
        in `dense` by its outputs with the weights from before."""
        built = self._built(layer)
        module = built.module
        first = len(flow) - len(dense)
        for number, inputs in enumerate(dense):
            dense[number] = self._forward(layer.name, module, first + number, inputs)
        if self.healed is None or not self._take_healed(built, masks):
            samples, errors = flow[: len(self.samples)], None
            self._draw(built, samples, masks)
            if self.fit is not None:
                differences = self._differences(built, samples, dense)
                errors = self._heal(self.fit, built, differences, masks)
                self._tell(layer, "error of a token", errors)
                if layer.name == self.pruned[-1]:
                    losses = self._losses(built, samples, targets)
                    errors = self._heal(self.fit.by_loss, built, losses, masks)
                    self._tell(layer, "loss of a target", errors)
            if self.healed is not None:
                self._keep(self.healed, built, masks, errors)
        for number, inputs in enumerate(flow):
            flow[number] = self._forward(layer.name, module, number, inputs)
        for tensor in built.state.owned if self.forgets else ():
            for drawn in (masks.bits, masks.kept_weights, masks.fitted):
                drawn.pop(tensor.name, None)

    def _built(self, layer: Layer) -> BuiltLayer:
        """A layer of the model as it was, dense and without moments; one of which nothing is pruned
        has weights only."""
        options = replace(self.options, masks=None, moments=(), replicas=ALONE, members=None)
        if layer.name not in self.pruned:
            layer = replace(layer, build=partial(_frozen, layer.build))
        [built] = build_layers([layer], self.ties, options)
        built.module.eval()
        return built

    def _take_healed(self, built: BuiltLayer, masks: CalibratedMasks) -> bool:
        """Take what an earlier start has made of a layer; False if it did not come so far."""
        assert self.healed is not None
        file = self.healed.read(built.spec.name)
        agreed = self.fit is None or self.fit.all_agree(file is not None)
        if file is None or not agreed:
            return False
        for tensor in built.state.owned:
            name, value = tensor.name, tensor.parameter.detach()
            if f"{MASK}{name}" in file.shapes:
                packed = file.read(f"{MASK}{name}").numpy()
                masks.bits[name] = Bits(packed, value.numel())
                if f"{KEPT}{name}" in file.shapes:
                    masks.kept_weights[name] = file.read(f"{KEPT}{name}")
            elif f"{FITTED}{name}" in file.shapes:
                masks.fitted[name] = file.read(f"{FITTED}{name}")
            value.copy_(self.healed.value(built.spec.name, name, value.cpu()))
        return True

    def _keep(
        self,
        healed: HealedLayers,
        built: BuiltLayer,
        masks: CalibratedMasks,
        errors: tuple[float, float] | None,
    ) -> None:
        """Write what was made of a layer, if anything is pruned there."""
        kept: dict[str, Tensor] = {}
        for tensor in built.state.owned:
            name = tensor.name
            if name in masks.bits:
                kept[f"{MASK}{name}"] = torch.from_numpy(masks.bits[name].packed)
            if name in masks.kept_weights:
                kept[f"{KEPT}{name}"] = masks.kept_weights[name]
            if name in masks.fitted:
                kept[f"{FITTED}{name}"] = masks.fitted[name]
        if kept:
            healed.write(built.spec.name, kept, errors)

    def _draw(self, built: BuiltLayer, flow: Sequence[Tensors], masks: CalibratedMasks) -> None:
        """Draw the masks of one layer and put them into its weights."""
        layer, module = built.spec, built.module
        multiplying = {
            name: one
            for name, one in self._weights(layer.name, module).items()
            if name in self.targets.shapes and self._sees_inputs
        }
        linear = {name: self._statistics(one) for name, one in multiplying.items()}
        stacks = {
            tensor.name: tensor.parameter.detach()
            for tensor in built.state.owned
            if tensor.name in self._stacks
        }
        experts = {
            name: ExpertStatistics(METHODS[self.method], name, stack, self._stacks[name])
            for name, stack in stacks.items()
        }
        gathered: dict[str, InputStatistics | ExpertStatistics] = {**linear, **experts}
        unseen = set(multiplying)
        # The replaced forwards hold the statistics, so no variable may keep them alive afterwards.
        with (
            forwards_in_place(
                {m: _adding(name, m, linear[name], unseen) for name, m in multiplying.items()}
            ),
            ExpertProducts(stacks, experts),
        ):
            for number, inputs in enumerate(flow if multiplying or stacks else ()):
                self._forward(layer.name, module, number, inputs)
        unmet = {name: one.unmet for name, one in experts.items()}
        unseen |= {name for name, none in unmet.items() if len(none) == len(stacks[name])}
        if unseen:
            raise ConfigError(
                f"pruning.method: {self.method} scores a matrix by the inputs of its layer, and "
                f"nobody calls that of {min(unseen)}; name it in pruning.exclude"
            )
        del linear, experts
        masks.unmet.extend(name for none in unmet.values() for name in none)
        for tensor in built.state.owned:
            if tensor.name in self.targets.shapes:
                before = built.state.dense_master(tensor.name).to(tensor.parameter.device)
                self._prune(
                    tensor.name, tensor.parameter, before, gathered.pop(tensor.name, None), masks
                )

    def _heal(
        self,
        fit: Fit,
        built: BuiltLayer,
        errors_of: Errors,
        masks: CalibratedMasks,
    ) -> tuple[float, float] | None:
        """Fit a layer of which something is pruned; returns the errors before and after, None if
        nothing is pruned."""
        name, module = built.spec.name, built.module
        shared = {*self.ties, *self.ties.values()}
        owned = {
            tensor.name.removeprefix(f"{name}."): tensor
            for tensor in built.state.owned
            if tensor.name not in shared
        }
        bits = {local: masks.bits.get(tensor.name) for local, tensor in owned.items()}
        pruned = {
            local: one.mask().view(owned[local].parameter.shape).to(owned[local].parameter.device)
            for local, one in bits.items()
            if one is not None
        }
        if not pruned:
            return None
        masters = {}
        for local, tensor in owned.items():
            values = built.state.dense_master(tensor.name).to(tensor.parameter.device)
            # The layer's own masters where they are no copy: nobody needs these afterwards. Of
            # split masters only the weights have become zeros, which may make no number of them.
            masters[local] = values
            if local in pruned:
                values.masked_fill_(~pruned[local], 0)
            kept = masks.kept_weights.get(tensor.name)
            if kept is not None:  # the method has changed it, or an earlier fit
                masters[local][pruned[local]] = kept.to(values)
            fitted = masks.fitted.get(tensor.name)
            if fitted is not None:
                masters[local].copy_(fitted)
        errors = fit.heal(module, masters, pruned, errors_of, len(self.samples))
        for local, tensor in owned.items():
            if local in pruned:
                masks.kept_weights[tensor.name] = masters[local][pruned[local]].cpu()
            else:
                masks.fitted[tensor.name] = masters[local].cpu().clone()
        return errors

    def _tell(self, layer: Layer, what: str, errors: tuple[float, float] | None) -> None:
        if errors is not None:
            before, after = errors
            self.says(f"heal: {layer.name}: {what} {before:.4f} before, {after:.4f} after")

    def _differences(
        self, built: BuiltLayer, flow: Sequence[Tensors], wanted: Sequence[Tensors]
    ) -> Errors:
        """The errors of what a layer puts out."""

        def errors(number: int) -> tuple[Tensor, int]:
            outputs = self._forward(built.spec.name, built.module, number, flow[number])
            return relative_error(outputs, wanted[number])

        return errors

    def _losses(
        self, built: BuiltLayer, flow: Sequence[Tensors], targets: Sequence[Tensors]
    ) -> Errors:
        """The losses of what the model says with a layer, through the layers behind it."""
        through = [built, *map(self._built, self.behind)]

        def errors(number: int) -> tuple[Tensor, int]:
            outputs = flow[number]
            for layer in through:
                outputs = self._forward(layer.spec.name, layer.module, number, outputs)
            wanted, count = targets[number]
            with preserved_rng(is_seeded=True):
                seed_all(self.options.seed, "", number, "calibrate")
                return self.loss(self.samples[number], wanted, outputs), int(count)

        return errors

    def _weights(self, layer: str, module: nn.Module) -> dict[str, Multiplying]:
        """The modules within a layer whose inputs decide, by the global names of their weights:
        linear ones, and convolutions for a score of the user's own.

        A class with a forward of its own may multiply another input than it gets.
        """
        kinds = (nn.Linear, *(CONVOLUTIONS if self.criterion.sees_inputs else ()))
        return {
            ".".join(part for part in (layer, path, "weight") if part): child
            for path, child in module.named_modules()
            for kind in kinds
            if isinstance(child, kind) and type(child).forward is kind.forward
        }

    def _statistics(self, module: Multiplying) -> InputStatistics:
        if not isinstance(module, nn.Linear):
            return PatchStatistics(module)
        return STATISTICS[self.method](module.in_features, module.weight.device)

    def _forward(self, name: str, module: nn.Module, number: int, inputs: Tensors) -> Tensors:
        """The outputs of a layer for a microbatch; what it draws is the same in every pass."""
        with preserved_rng(is_seeded=True):
            seed_all(self.options.seed, name, number, "calibrate")
            own = self._passing[number]
            outputs = telling_sample(
                lambda: _named(name, module, inputs), inputs, own.samples, own.source
            )
            return tuple(map(canonical, as_tuple(name, outputs)))

    def _prune(
        self,
        name: str,
        weight: Tensor,
        before: Tensor,
        statistics: InputStatistics | ExpertStatistics | None,
        masks: CalibratedMasks,
    ) -> None:
        """Draw the mask of a matrix and put its kept entries into `weight`.

        A function of its own, so that all this is freed before the next matrix.
        """
        if self.criterion.sees_inputs or statistics is None:
            criterion = replace(self.criterion, stacks=self.targets.stacks)
            if statistics is not None:
                assert isinstance(statistics, WandaStatistics)
                criterion = criterion.given(inputs=statistics.norms.cpu())
            shape = tuple(before.shape)
            mask = criterion.mask(name, shape, before.cpu, masks.kept[name])
            mask = mask.view(shape).to(before.device)
            after = before * mask
        else:
            mask, after = statistics.prune(before, self._how_many(name))
        masks.bits[name] = Bits(np.packbits(mask.cpu().view(-1).numpy()), mask.numel())
        weight.copy_(after)
        if statistics is not None and statistics.changes_weights:
            # Indices of two dimensions take less memory than those of a stack's three.
            masks.kept_weights[name] = weight.flatten(0, -2)[mask.flatten(0, -2)].cpu()

    def _kept(self) -> dict[str, int]:
        """How many entries of each matrix stay."""
        if self.method not in METHODS:
            return self.targets.kept()
        kept = {}
        for name in self.targets.shapes:
            number, shape = self.targets.matrices(name)
            kept[name] = number * STATISTICS[self.method].kept(shape, self._how_many(name))
        return kept

    @property
    def _stacks(self) -> Mapping[str, int]:
        """The tensors that are a matrix for each expert, if their inputs decide."""
        return self.targets.stacks if self.method in METHODS else {}

    @property
    def _sees_inputs(self) -> bool:
        """Whether the method looks at inputs, and not at weights alone."""
        return self.method in METHODS or self.criterion.sees_inputs

    def _how_many(self, name: str) -> HowMany:
        if self.criterion.pattern is not None:
            return self.criterion.pattern
        return self.targets.own.get(name, self.targets.sparsity)

    def _prepared(self, inputs: Tensors) -> Tensors:
        """Inputs of the first layer on its device, floating-point ones in the run's precision."""
        device, dtype = self.options.backend.device, self.options.dtype
        return tuple(
            tensor.to(device, dtype) if tensor.is_floating_point() else tensor.to(device)
            for tensor in inputs
        )

    def _targets_of(self, number: int) -> Tensors:
        """The targets of a microbatch of samples, and their number; on the first stage."""
        targets, device = self.samples[number].targets, self.options.backend.device
        assert targets is not None, "the first stage reads the targets of samples"
        return targets.to(device), torch.tensor([self.num_targets[number]]).to(device)

    def _received(self, link: Link, count: int) -> list[Tensors]:
        """The activations that the stage before sends, a message for each microbatch."""
        flow: list[Tensors] = []
        backoff = self.transport.backoff
        backoff.reset()
        while len(flow) < count:
            for message in link.arrivals():
                flow.append(tuple(tensor for tensor in message.tensors if tensor is not None))
                backoff.reset()
            if len(flow) < count:
                backoff.pause()
        return flow


def _frozen(build: Callable[[], nn.Module]) -> nn.Module:
    return build().requires_grad_(False)


class Progress:
    """Shows the first of several texts, and later ones when some seconds have passed."""

    def __init__(self, says: Callable[[str], None], clock: Callable[[], float] = monotonic) -> None:
        self._says = says
        self._clock = clock
        self._shown = -SECONDS

    def show(self, text: str) -> None:
        if self._clock() - self._shown >= SECONDS:
            self._shown = self._clock()
            self._says(text)


def _named(name: str, module: nn.Module, inputs: Tensors) -> object:
    """What a layer returns, whose errors name it."""
    with noted(f"layer {name}"):
        return module(*inputs)


def _adding(
    name: str, module: Multiplying, statistics: InputStatistics, unseen: set[str]
) -> Callable[[Tensor], Tensor]:
    """The forward of a module that also adds its inputs to statistics.

    It takes the module's name out of `unseen`. Some modules are never called: the projection of an
    `nn.MultiheadAttention` hands over its weight alone.
    """
    forward = module.forward

    def add_and_call(input: Tensor) -> Tensor:  # noqa: A002
        is_linear = isinstance(module, nn.Linear)
        statistics.add(input.reshape(-1, input.shape[-1]) if is_linear else input)
        unseen.discard(name)
        return forward(input)

    return add_and_call
