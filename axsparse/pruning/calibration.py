"""Draws masks from the inputs of each layer, one layer at a time, before state is built.

Calibration samples pass through the stages once. A stage has its samples' activations and one
layer: it runs the layer on all samples to gather statistics, prunes the layer's matrices, and runs
it again to make the inputs of the next layer. The last activations of a stage travel to the next
one. Every replica does the same by itself, so that masks depend neither on the number of stages nor
on the number of replicas. `layer_pruning` has the work on one layer.

With a `Reconstruction` the samples also pass through the layers as they were, and each pruned layer
is fitted to the dense one's outputs, before the next layer is pruned (`healing`); the last pruned
layer of the model is then fitted by the loss. The samples' targets travel behind the activations,
since any stage may have that layer. Other samples pass behind them by both ways, for the losses
before and after.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from time import monotonic, perf_counter

import torch
from torch import Tensor

from axsparse.data.batches import Batch, Microbatch
from axsparse.models.layer import Layer, as_arguments, as_tuple
from axsparse.models.module_buffers import switch_mode
from axsparse.models.start_weights import LOAD, some_of
from axsparse.pruning.healing import (
    FITTED,
    KEPT,
    LOSS_RATE,
    MASK,
    Errors,
    HealedLayers,
    Reconstruction,
    changed_value,
    relative_error,
)
from axsparse.pruning.input_statistics import WandaStatistics
from axsparse.pruning.layer_pruning import CalibratedMasks, LayerPruning
from axsparse.pruning.outliers import outlier_share
from axsparse.runtime.canonical_form import canonical
from axsparse.runtime.communication import Direction, Link, Message, Transport
from axsparse.runtime.console import format_seconds
from axsparse.runtime.errors import ConfigError, TrainingError, note_errors
from axsparse.runtime.grid import RankCoords
from axsparse.runtime.seeds import preserved_rng, seed_all
from axsparse.samo.layer_construction import BuiltLayer, StateOptions, build_layers
from axsparse.samo.shards import ALONE

Tensors = tuple[Tensor, ...]
SECONDS = 5.0
"""The shortest time between two lines that say how far the calibration is."""
TIMED = 3
"""How often a layer runs to be timed, the first time with compilation and cold caches."""


@dataclass(frozen=True)
class Calibration:
    """The settings that decide the masks, and the stage of this rank."""

    pruning: LayerPruning
    layers: Sequence[Layer]
    pruned: Sequence[str]
    """All layers of which something is pruned; the last one is fitted by the loss as well."""
    options: StateOptions
    coords: RankCoords
    transport: Transport
    loss: Callable[[Tensor, Tensors], Tensor]
    """Gives the summed loss of a microbatch, from its targets and the outputs of the last layer."""
    samples: Sequence[Microbatch]
    """The calibration samples in microbatches; stages behind the first have them without inputs."""
    held_out: Batch
    """The samples of which the loss is computed before and after; nothing is made of them else."""
    says: Callable[[str], None] = lambda _: None
    shows: Callable[[int, int, str], None] = lambda *_: None
    """Draws how many of the layers of this stage are done, next to a text."""
    fit: Reconstruction | None = None
    """How pruned layers are fitted to the dense ones; None leaves them as they were pruned."""
    num_targets: Sequence[int] = ()
    """The number of targets in each microbatch of samples, on the first stage."""
    behind: Sequence[Layer] = ()
    """The layers of the model behind the last one of which something is pruned."""
    healed: HealedLayers | None = None
    """The folder of finished layers, for a start that is resumed; None keeps none."""
    beats: Callable[[], None] = lambda: None
    """Tells a watchdog that the calibration of this rank gets on."""
    forgets: bool = False
    """Whether finished layers in that folder leave the memory, since no state is built of them."""

    def check(self) -> None:
        """ConfigError for matrices that the method cannot prune, and for a model that is to be
        healed and was never trained."""
        if self.fit is not None and self.options.start is None:
            raise ConfigError(
                "pruning.heal: layers are fitted to what they put out as they were loaded, and "
                f"this model starts from drawn values; {LOAD}, or leave pruning.heal out"
            )
        self.pruning.check()

    def seconds_of_layer(self) -> float | None:
        """Seconds of a forward and a backward of the first pruned layer of this stage for one
        microbatch of samples; None if the stage is not the first, or has none."""
        if not self.coords.is_first:
            return None
        inputs, times = self._prepared(self.samples[0].inputs), []
        for layer in self.layers:
            built = self._built(layer)
            if layer.name in self.pruned:
                parameters = [each for each in built.module.parameters() if each.requires_grad]
                for _ in range(TIMED):
                    began = perf_counter()
                    with torch.enable_grad():
                        outputs = self._forward(built, 0, inputs)
                        sums = [each.float().sum() for each in outputs if each.requires_grad]
                    gradients = torch.autograd.grad(sums, parameters, allow_unused=True)
                    float(sum(each.sum() for each in gradients if each is not None))  # on a GPU
                    times.append(perf_counter() - began)
                return min(times)
            with torch.no_grad():
                inputs = self._forward(built, 0, inputs)
        return None

    def draw(self) -> CalibratedMasks:
        """The masks; all ranks call this together."""
        masks = CalibratedMasks(self.pruning.targets.kept(), self.options.start)
        # Held-out samples also pass through the layers as they were, and all samples do where
        # layers are fitted.
        both = (*self.samples, *self.held_out.microbatches)
        again = both if self.fit is not None else self.held_out.microbatches
        fitted = self.samples if self.fit is not None else ()
        with self._passing((*both, *again), len(fitted)) as flow, torch.no_grad():
            pruned, dense = flow[: len(both)], flow[len(both) : len(both) + len(again)]
            targets = flow[len(both) + len(again) :]
            flow.clear()
            progress = CalibrationProgress(self.says, self.shows, len(self.layers), monotonic())
            for number, layer in enumerate(self.layers):
                progress.show(
                    number,
                    f"{self.pruning.method}: stage {self.coords.stage}, layer {number + 1} of "
                    f"{len(self.layers)}, {len(self.samples)} microbatches of samples",
                    monotonic(),
                )
                self._pass(layer, pruned, dense, targets, masks)
            if masks.unmet:
                self.says(
                    f"{self.pruning.method}: no token of the samples met {len(masks.unmet)} "
                    f"matrices of experts, which are pruned by magnitude: {some_of(masks.unmet)}"
                )
            if self.coords.is_last:
                masks.losses.extend(map(self._mean_loss, (dense, pruned)))
            flow.extend((*pruned, *dense, *targets))
        return masks

    def outlier_shares(self) -> dict[str, float]:
        """`outliers.outlier_share` of each layer of this stage of which something is to be pruned;
        all ranks call this together."""
        shares = {}
        with self._passing(self.samples) as flow, torch.no_grad():
            for layer in self.layers:
                built = self._built(layer)
                run = partial(self._run, built, flow)
                if found := self.pruning.gathered(built, WandaStatistics, run):
                    shares[layer.name] = outlier_share(found, built.state.dense_master)
                for number, inputs in enumerate(flow):
                    flow[number] = self._forward(built, number, inputs)
        return shares

    @contextmanager
    def _passing(self, samples: Sequence[Microbatch], targets: int = 0) -> Iterator[list[Tensors]]:
        """The activations of samples that come to this stage, and behind them the targets of the
        first ones; what has become of them then goes to the next stage."""
        branch = self.transport.branch()
        link = branch.link(self.coords)
        if self.coords.is_first:
            flow = [self._prepared(each.inputs) for each in samples]
            flow += [self._targets_of(number) for number in range(targets)]
        else:
            flow = self._received(link, len(samples) + targets)
        yield flow
        if not self.coords.is_last:
            for number, tensors in enumerate(flow):
                link.send(Message(Direction.FORWARD, number, tensors))
        branch.close()  # and its link, once all is sent

    def _mean_loss(self, flow: Sequence[Tensors]) -> float:
        """The mean loss of a target of the held-out samples, which are the last of a flow."""
        held_out = self.held_out.microbatches
        outputs = flow[len(flow) - len(held_out) :]
        losses = []
        for each, given in zip(held_out, outputs, strict=True):
            assert each.targets is not None, "the last stage reads targets"
            losses.append(float(self.loss(each.targets, given)))
        return (
            math.fsum(losses) / self.held_out.num_targets if self.held_out.num_targets else math.nan
        )

    def _pass(
        self,
        layer: Layer,
        flow: list[Tensors],
        dense: list[Tensors],
        targets: Sequence[Tensors],
        masks: CalibratedMasks,
    ) -> None:
        """Draw the masks of one layer, and replace its inputs by its outputs, pruned and dense."""
        built = self._built(layer)
        first = len(flow) - len(dense)
        for number, inputs in enumerate(dense):
            dense[number] = self._forward(built, first + number, inputs)
        if self.healed is None or not self._take_healed(built, masks):
            # Without a name here, the inputs of the samples go as their outputs come below.
            self._prune(built, flow[: len(self.samples)], dense, targets, masks)
            names = {tensor.name for tensor in built.state.owned}
            kept = {key: it for key, it in masks.drawn.items() if key.partition(" ")[2] in names}
            if self.healed is not None and kept:
                self.healed.write(layer.name, kept)
        for number, inputs in enumerate(flow):
            flow[number] = self._forward(built, number, inputs)
        for tensor in built.state.owned if self.forgets else ():
            for kind in (MASK, KEPT, FITTED):
                masks.drawn.pop(f"{kind}{tensor.name}", None)

    def _prune(
        self,
        built: BuiltLayer,
        samples: Sequence[Tensors],
        dense: Sequence[Tensors],
        targets: Sequence[Tensors],
        masks: CalibratedMasks,
    ) -> None:
        """Draw one layer's masks and fit its kept weights."""
        self.pruning.draw(built, partial(self._run, built, samples), masks)
        if self.fit is None:
            return
        difference = partial(self._difference, built, samples, dense)
        self._heal(self.fit, "error of a token", built, difference, masks)
        if built.spec.name == self.pruned[-1]:
            through = [built, *map(self._built, self.behind)]
            loss = partial(self._loss_through, through, samples, targets)
            by_loss = replace(self.fit, rate=LOSS_RATE * self.fit.rate)
            self._heal(by_loss, "loss of a target", built, loss, masks)

    def _built(self, layer: Layer) -> BuiltLayer:
        alone = replace(self.options, replicas=ALONE, sharding=None, expansion=None)
        options = replace(alone, masks=None, stored=replace(self.options.stored, moments=()))
        if layer.name not in self.pruned:
            build = layer.build
            layer = replace(layer, build=lambda: build().requires_grad_(False))
        [built] = build_layers([layer], self.pruning.ties, options)
        switch_mode(built.spec.name, built.module, training=False)
        return built

    def _take_healed(self, built: BuiltLayer, masks: CalibratedMasks) -> bool:
        """Read a layer that an earlier start has finished; False if it did not come so far."""
        assert self.healed is not None
        file = self.healed.read(built.spec.name)
        agreed = self.fit is None or self.fit.all_agree(file is not None)
        if file is None or not agreed:
            return False
        masks.drawn.update((key, file.read(key)) for key in file.shapes)
        for tensor in built.state.owned:
            value = tensor.parameter.detach()
            value.copy_(changed_value(tensor.name, value.cpu(), file.shapes, file.read))
        return True

    def _heal(
        self,
        fit: Reconstruction,
        what: str,
        built: BuiltLayer,
        errors_of: Errors,
        masks: CalibratedMasks,
    ) -> None:
        """Fit a pruned layer, and say the errors before and after, which `what` names."""
        name, module = built.spec.name, built.module
        shared = {*self.pruning.ties, *self.pruning.ties.values()}
        owned = {
            built.spec.local_name(tensor.name): tensor
            for tensor in built.state.owned
            if tensor.name not in shared
        }
        pruned = {}
        for local, tensor in owned.items():
            if f"{MASK}{tensor.name}" in masks.drawn:
                shape = tuple(tensor.parameter.shape)
                mask = masks.mask(tensor.name, shape, tensor.parameter.cpu).view(shape)
                pruned[local] = mask.to(tensor.parameter.device)
        if not pruned:
            return
        masters = {}
        for local, tensor in owned.items():
            values = built.state.dense_master(tensor.name).to(tensor.parameter.device)
            # The layer's own masters where they are no copy: nobody needs these afterwards.
            masters[local] = values
            if local in pruned:
                values.masked_fill_(~pruned[local], 0)
            kept = masks.drawn.get(f"{KEPT}{tensor.name}")
            if kept is not None:  # the method has changed it, or an earlier fit
                masters[local][pruned[local]] = kept.to(values)
            fitted = masks.drawn.get(f"{FITTED}{tensor.name}")
            if fitted is not None:
                masters[local].copy_(fitted)
        before, after = fit.heal(module, masters, pruned, errors_of, len(self.samples))
        if not math.isfinite(before):
            raise TrainingError(
                f"pruning.heal: {name} puts out numbers in {self.options.stored.weight} that are "
                "not finite; choose another precision, or other texts"
            )
        if self.fit is not None and not math.isfinite(after):
            raise TrainingError(
                f"pruning.heal_rate: at {self.fit.rate:g} the error of {name} goes from "
                f"{before:.4f} to {after}; choose a smaller rate"
            )
        for local, tensor in owned.items():
            if local in pruned:
                masks.drawn[f"{KEPT}{tensor.name}"] = masters[local][pruned[local]].cpu()
            else:
                masks.drawn[f"{FITTED}{tensor.name}"] = masters[local].cpu().clone()
        self.says(f"heal: {name}: {what} {before:.4f} before, {after:.4f} after")

    def _difference(
        self, built: BuiltLayer, flow: Sequence[Tensors], wanted: Sequence[Tensors], number: int
    ) -> tuple[Tensor, int]:
        return relative_error(self._forward(built, number, flow[number]), wanted[number])

    def _loss_through(
        self,
        layers: Sequence[BuiltLayer],
        flow: Sequence[Tensors],
        targets: Sequence[Tensors],
        number: int,
    ) -> tuple[Tensor, int]:
        """The loss of a microbatch through a layer and those after it, and its targets' number."""
        outputs = flow[number]
        for layer in layers:
            outputs = self._forward(layer, number, outputs)
        wanted, count = targets[number]
        with preserved_rng(is_seeded=True):
            seed_all(self.options.seed, "", number, "calibrate")
            return self.loss(wanted, outputs), int(count)

    def _run(self, built: BuiltLayer, flow: Sequence[Tensors]) -> None:
        """Run a layer on all microbatches, for whoever watches its products."""
        for number, inputs in enumerate(flow):
            self._forward(built, number, inputs)

    def _forward(self, built: BuiltLayer, number: int, inputs: Tensors) -> Tensors:
        """The outputs of a layer for a microbatch, with the same random numbers in every pass; it
        gets copies, since it may write into its inputs."""
        name, module = built.spec.name, built.module
        self.beats()
        inputs = tuple(each.clone() for each in inputs)
        with preserved_rng(is_seeded=True):
            seed_all(self.options.seed, name, number, "calibrate")
            with note_errors(f"layer {name}"), _shown_products():
                return tuple(map(canonical, as_tuple(name, module(*as_arguments(module, inputs)))))

    def _prepared(self, inputs: Tensors) -> Tensors:
        """Inputs of the first layer on its device, floating-point ones in the run's precision."""
        device, dtype = self.options.backend.device, self.options.stored.weight
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
                self.beats()
                backoff.reset()
            if len(flow) < count:
                backoff.pause()
        return flow


@contextmanager
def _shown_products() -> Iterator[None]:
    """Keep torch's attention and encoder layers from a kernel that hides their products. The code
    within does not wait for other ranks."""
    is_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(is_enabled)


@dataclass
class CalibrationProgress:
    """Shows the first of several texts, and later ones when some seconds have passed, with the time
    that is left by the layers that are done."""

    says: Callable[[str], None]
    shows: Callable[[int, int, str], None]
    layers: int
    began: float
    said: float = -math.inf

    def show(self, done: int, text: str, now: float) -> None:
        if done:
            left = (now - self.began) / done * (self.layers - done)
            text += f", eta {format_seconds(left)}"
        self.shows(done, self.layers, text)
        if now - self.said >= SECONDS:
            self.said = now
            self.says(text)
