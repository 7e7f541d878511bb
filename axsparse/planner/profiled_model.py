"""A profiled model: its layers, cut into stages and tensor-parallel shards as a run does it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TypeAlias

import torch

from axsparse.config.schema import Config
from axsparse.config.section import divisors, one_of
from axsparse.config.validate import STAGING_BYTES
from axsparse.models.layer import Model, TensorShard
from axsparse.models.layer_cost import NO_SUMS, Activations
from axsparse.models.model_profile import LayerInfo, ModelProfile
from axsparse.pipeline.partition import partition, split_by_hand
from axsparse.planner.cluster import Precision
from axsparse.planner.stage_memory import (
    Fits,
    StageLoad,
    activation_memory,
    is_recomputed,
    no_bytes,
    value_bytes,
)
from axsparse.pruning.input_statistics import METHODS, STATISTICS
from axsparse.runtime.communication import NO_SUM
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid
from axsparse.runtime.machine import LARGEST_KEPT
from axsparse.samo.optim.optimizer import Optimizer
from axsparse.samo.precision import DTYPES, accumulates_in_half
from axsparse.samo.selection import CHUNK
from axsparse.samo.state_bytes import StateFormat, stage_bytes
from axsparse.tensor_parallel.dry_run import profile_of_tp_shard
from axsparse.tensor_parallel.modules import UnevenError, check_plan, shards_of

LOSS_BYTES = 8
"""Bytes that the loss takes for each number of the last layer's output, and for each logit that
the loss computes itself: two fp32 numbers, a copy and its gradient. A loss that works in chunks was
measured to take 5 bytes a logit in fp32 and 6.5 in bf16."""


DISTILLED_BYTES = 16
"""The same for each logit of a model that learns from a teacher: four fp32 numbers, the logits of
both and what is made of them; 12 bytes were measured in fp32 and in bf16."""
CUT_LOSS_BYTES = 20
"""The same for each logit of a loss of which tensor-parallel ranks compute shards and whose
backward autograd derives: five fp32 numbers, as torch's allocator counts them."""
Contents: TypeAlias = tuple[Sequence[int], bool, bool]
CHOSEN_BYTES = 16
"""Bytes that torch takes for each entry which it picks out of a matrix by a mask."""
HEALING_BYTES = 25
"""Bytes that healing takes for each parameter of a layer in addition to its gradient: the master
and a copy, two moments, the sum of the gradients of several microbatches, and the mask."""
GATHERED_BYTES = 12
"""Bytes for each entry of a tensor that a tensor-parallel rank gathers from shards to save it: in
fp32, the shards that the ranks send, the full tensor, and up to half as much of its own shard."""
SCORED_BYTES = 18
"""Bytes for each entry of a tensor that is scored by its gradient, on the host: its weights and a
copy, the gradient, the score and a number on the way to it, and selecting; measured to be 17."""


def _made(layers: Sequence[LayerInfo]) -> int:
    """The most bytes in fp32 that a start value of these layers takes until it is in its place,
    together with its part that is on its way there."""
    largest = _largest(layers)
    return 4 * (largest + min(largest, CHUNK))


def _frozen(layer: LayerInfo) -> LayerInfo:
    """The same layer, of which nothing is trained: it has weights, and no other state."""
    parameters = tuple(replace(parameter, trained=False) for parameter in layer.parameters)
    return replace(layer, parameters=parameters)


def _largest(layers: Sequence[LayerInfo]) -> int:
    return max((p.numel for layer in layers for p in layer.parameters), default=0)


def calibration_memory(
    model: ProfiledModel, layers: Sequence[LayerInfo], stored: StateFormat
) -> tuple[Callable[[int], float], float]:
    """The bytes of a stage of a full model, by the samples of a microbatch, while
    `pruning.calibration` draws its masks, before it has any state in the format `stored`; and the
    bytes of its masks and changed weights, which stay until its state is built.

    A layer is dense and without moments. The stage has the activations of all samples and the
    statistics of all matrices of the layer, and works on one matrix at a time. One more microbatch,
    which is held out, also passes through the layers as they were.
    """
    pruning, dense = model.config.pruning, replace(stored, moments=(), replicas=1)
    ties, kept, on_host = model.profile.ties, model.kept, model.on_host
    last_pruned = model.profile.layers[model.last_pruned].name
    method, heals = STATISTICS.get(pruning.method), pruning.heal != "none"
    drawn = 0.0
    moments: list[tuple[float, float]] = []  # bytes of each, and more for each sample
    for layer in layers:
        costs = layer.activations or Activations(0, 0, 0, 0)
        matrices = [p for p in layer.parameters if p.name in kept]
        built = layer if matrices else _frozen(layer)
        there = stage_bytes([built], ties, {}, dense).total + drawn * on_host
        state_after, made_after, passing_after = 0.0, 0.0, 0.0
        if layer.name == last_pruned:  # it is fitted by the loss
            state_after, made_after, passing_after = model.after_last_pruned(dense)
        # Where layers are healed the samples also pass through the layers as they were.
        flows = 1 + heals
        there += flows * pruning.calibration_samples * max(costs.inputs, costs.outputs)
        statistics = sum(
            p.matrices[0] * method.statistics_bytes(math.prod(p.matrices[1][1:]))
            for p in matrices
            if method is not None
        )
        working = 0
        for matrix in matrices:
            # Experts are worked on one by one, into the mask and the weights of all; a transposed
            # matrix is copied.
            _, shape = matrix.matrices
            together = 5 * matrix.numel if matrix.input_dim is not None else 0
            most = 21 * matrix.numel if method is None else method.working(shape) + together
            if method is not None and method.changes_weights:
                # Methods that keep the weights that they have changed.
                most = max(most, 5 * matrix.numel + CHOSEN_BYTES * kept[matrix.name])
            working = max(working, most)
        twice = 2 * max(costs.inputs, costs.outputs)
        moments.append((there + statistics + working, twice))
        # The samples pass while statistics are gathered, and once more when they are gone.
        moments.append((there + statistics, twice + costs.saved + costs.outputs))
        if heals and matrices:
            trained = sum(p.numel for p in layer.parameters if p.trained)
            state = trained * (HEALING_BYTES + stored.weight.itemsize)
            passing = costs.saved + costs.outputs + 2 * costs.widest
            moments.append((there + state + state_after, twice + passing + passing_after))
            drawn += 4 * (trained - sum(p.numel for p in matrices))
        moments.append((there + max(_made([layer]), made_after), twice))
        changes = heals or (method is not None and method.changes_weights)
        for matrix in matrices:
            drawn += matrix.numel / 8 + (4 * kept[matrix.name] if changes else 0)
    return lambda samples: max(fixed + samples * each for fixed, each in moments), drawn * on_host


def state_format(
    config: Config, optimizer: Optimizer, g_data: int, *, adds_in_half: bool = False
) -> StateFormat:
    """How a run of `g_data` replicas stores its state; `adds_in_half` decides `samo.gradient:
    auto`."""
    assert config.precision != "auto", "decided before profiling"
    samo, dtype = config.samo, DTYPES[config.precision]
    kinds = {"exact": torch.int64, "half": dtype, "auto": dtype if adds_in_half else torch.float32}
    return StateFormat(
        dtype,
        kinds.get(samo.gradient, torch.float32),
        optimizer.moments,
        samo.index,
        # Where `auto` does not shard, the fullest share is as large as the full state.
        replicas=g_data if samo.zero_stage else 1,
        offload=samo.offload,
        weights="sparse" if samo.weights == "sparse" else "dense",
        gathers=samo.zero_stage == 3,
    )


def copied_bytes(config: Config) -> float:
    """Bytes of host memory that a rank's checkpoint copies may take while training continues."""
    saves = config.checkpoint
    saves_before_the_end = 0 < saves.every < config.train.steps
    return STAGING_BYTES if saves_before_the_end else 0.0


@dataclass(frozen=True)
class ProfiledModel:
    """A model whose layers have been profiled, as a configuration trains it."""

    config: Config
    """The settings of the run, with the precision decided."""
    profile: ModelProfile
    kept: Mapping[str, int]
    """How many entries each pruned tensor keeps, by the name of the weight's first use; empty if
    nothing is pruned."""
    optimizer: Optimizer
    model: Model | None = None
    """The layers, which name the modules to shard; None: they are not sharded."""
    on_host: bool = True
    """Whether the memory that is planned is the host's, where the copies for checkpoints are."""
    has_masks: bool = False
    """Whether a run that resumes has its masks already, so that none are drawn from samples."""
    sees_inputs: bool = False
    """Whether a custom score takes inputs, so that `custom` draws masks from samples."""
    sees_gradients: bool = False
    """Whether a custom score takes gradients, as snip's does."""
    full: ProfiledModel | None = None
    """The full model, if this is the shard of one tensor-parallel rank. Masks are drawn from full
    tensors, and one rank saves full tensors."""
    _profiles: dict[int, ModelProfile] = field(default_factory=dict, repr=False, compare=False)
    _of_shards: dict[int, ProfiledModel] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _loads: dict[tuple[Contents, int, bool], StageLoad] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Loads by the contents of their layers: a search asks for the same stages repeatedly, and
    stages of equal layers have equal loads."""

    @property
    def precision(self) -> Precision:
        assert self.config.precision != "auto", "decided before profiling"
        return self.config.precision

    @property
    def is_pruned(self) -> bool:
        """Whether backwards compress their gradients."""
        return bool(self.kept)

    @property
    def recomputes(self) -> bool:
        return self.config.pipeline.checkpoint_activations > 0

    @property
    def most_stages(self) -> int:
        return len(self.profile.layers)

    @property
    def sample_flops(self) -> float:
        """Flops of a sample's forward and backward, by which the percentage of peak is counted:
        three times the forward's, four times for recomputed layers, and a teacher's once."""
        every = self.config.pipeline.checkpoint_activations
        again = sum(
            layer.flops for n, layer in enumerate(self.profile.layers) if is_recomputed(n, every)
        )
        teacher = self.profile.teacher
        return 3 * self.profile.flops + again + (0.0 if teacher is None else teacher.flops)

    def shards(self, g_tensor: int, ranks: int = 0) -> dict[str, TensorShard]:
        """The last shard of each sharded parameter, by global name; empty for one rank.

        ConfigError for a number of ranks that does not divide what is sharded, which suggests
        those that do and divide all `ranks` (0: any), and for what does not work with shards.
        """
        try:
            return self._shards(g_tensor)
        except UnevenError as error:
            choices = [n for n in divisors(math.gcd(g_tensor, ranks)) if self._is_even(n)]
            also = ", and layout.g_data auto" * (self.config.layout.g_data != "auto")
            raise ConfigError(f"{error}; choose {one_of(choices, near=g_tensor)}{also}") from None

    def _is_even(self, g_tensor: int) -> bool:
        with suppress(UnevenError):
            return self._shards(g_tensor) is not None
        return False

    def _shards(self, g_tensor: int) -> dict[str, TensorShard]:
        if g_tensor == 1:
            return {}
        assert self.model is not None, "nobody says which modules are sharded"
        if self.profile.teacher is not None:
            raise ConfigError(
                f"{self.config.where('train.teacher')}: a teacher's layers are not sharded, and "
                f"layout.g_tensor is {g_tensor}; choose 1, and more stages (layout.g_inter)"
            )
        fuses = self.config.pipeline.compile is True
        where = self.config.where("layout.g_tensor")
        check_plan(self.model.layers, self.model.name, where, fuses=fuses)
        found: dict[str, TensorShard] = {}
        for layer, info in zip(self.model.layers, self.profile.layers, strict=True):
            shapes = {layer.local_name(p.name): p.shape for p in info.parameters}
            of_layer = shards_of(layer, shapes, g_tensor - 1, g_tensor, where)
            found.update((layer.full_name(name), shard) for name, shard in of_layer.items())
        return found

    def tp_shard(self, g_tensor: int) -> ProfiledModel:
        """The model of the last rank, which holds most, with kept entries spread evenly over the
        shards of a tensor. ConfigError as `shards`."""
        if g_tensor == 1:
            return self
        if g_tensor not in self._of_shards:
            if g_tensor not in self._profiles:
                is_sharded = self.shards(g_tensor)
                last = Grid(1, 1, g_tensor).coords(g_tensor - 1)
                self._profiles[g_tensor] = (
                    profile_of_tp_shard(self.model, self.profile, last, DTYPES[self.precision])
                    if self.model is not None and is_sharded
                    else self.profile
                )
            profile = self._profiles[g_tensor]
            shapes, kept = self.profile.shapes, {}
            for parameter in (p for layer in profile.layers for p in layer.parameters):
                full, _, _ = parameter.name.partition("#")
                if full in self.kept:
                    of_all = self.kept[full] * parameter.numel
                    kept[parameter.name] = -(-of_all // math.prod(shapes[full]))
            self._of_shards[g_tensor] = replace(self, profile=profile, kept=kept, full=self)
        return self._of_shards[g_tensor]

    def stages(
        self, g_inter: int, g_data: int, fits: Fits | None = None, *, microbatches: int = 1
    ) -> list[StageLoad] | None:
        """The load of each of `g_inter` stages: the stage with most work has as little as can be,
        among the splits whose every stage passes `fits`; None if there is no such split.

        State may be sharded over `g_data` replicas; `microbatches`, per step and replica, may
        decide in which precision gradients add up.
        """
        known: dict[tuple[int, Contents], bool] = {}

        def fits_budget(stage: int, layers: range) -> bool:
            key = stage, self._contents(layers)
            if key not in known:
                load = self._load(layers, g_data, microbatches)
                known[key] = fits is None or fits(stage, load)
            return known[key]

        split = self.config.layout.split
        found: list[range] | None
        if split == "auto":
            work = self.profile.shares_of_work
            found = partition(work, g_inter, None if fits is None else fits_budget)
        else:
            found = split_by_hand(split)
            assert len(found) == g_inter, "a split says how many stages"
            if not all(fits_budget(stage, layers) for stage, layers in enumerate(found)):
                found = None
        if found is None:
            return None
        return [self._load(layers, g_data, microbatches) for layers in found]

    def _load(self, numbers: range, g_data: int, microbatches: int) -> StageLoad:
        adds_in_half = accumulates_in_half(microbatches)
        key = (self._contents(numbers), g_data, adds_in_half)
        if key not in self._loads:
            self._loads[key] = self._new_load(numbers, g_data, adds_in_half)
        first, last = (self.profile.layers[n].name for n in (numbers[0], numbers[-1]))
        name = first if len(numbers) == 1 else f"{first}–{last}"
        return replace(self._loads[key], layers=name, numbers=numbers)

    def _contents(self, numbers: range) -> Contents:
        """The key of the load of these layers: their kinds, whether the model's last is here, and
        whether the last that is pruned is."""
        has_last_pruned = (self.full or self).last_pruned in numbers
        kinds = self._kinds[numbers.start : numbers.stop]
        return kinds, numbers.stop == len(self.profile.layers), has_last_pruned

    @cached_property
    def _kinds(self) -> tuple[int, ...]:
        """Equal numbers for equal layers. With a teacher the layers next to them are equal, too."""
        known: dict[object, int] = {}
        return tuple(
            known.setdefault(
                (self._kind(layer), *map(self._kind, self.profile.taught_by(range(n, n + 1)))),
                len(known),
            )
            for n, layer in enumerate(self.profile.layers)
        )

    def _kind(self, layer: LayerInfo) -> object:
        """All of a layer that its bytes and times depend on; tied weights by their names."""
        ties = self.profile.ties
        tied = {*ties, *ties.values()}
        if self.profile.teacher is not None:
            tied |= {*self.profile.teacher.ties, *self.profile.teacher.ties.values()}
        parameters = tuple(
            (replace(p, name=p.name if p.name in tied else ""), self.kept.get(p.name))
            for p in layer.parameters
        )
        return layer.flops, layer.activations, layer.buffer_bytes, layer.sums, parameters

    def _new_load(self, numbers: range, g_data: int, adds_in_half: bool) -> StageLoad:
        config, full = self.config, self.full or self
        layers, uncut = ([s.layers[n] for n in numbers] for s in (self.profile, full.profile))
        every = config.pipeline.checkpoint_activations
        again = [layer for number, layer in enumerate(layers) if is_recomputed(number, every)]
        width = value_bytes(self.precision)
        last = layers[-1].activations
        outputs = 0 if last is None else last.outputs
        is_last = numbers.stop == len(self.profile.layers)
        held, working, deferred = activation_memory(layers, every)
        stored = state_format(config, self.optimizer, g_data, adds_in_half=adds_in_half)
        calibration: Callable[[int], float] = no_bytes
        drawn = 0.0
        pruning = config.pruning
        samples = pruning.method in METHODS or self.sees_inputs or pruning.heal != "none"
        draws = samples and config.pruning.mask is None
        if draws and self.kept and not self.has_masks:
            calibration, drawn = calibration_memory(full, uncut, stored)
        logits = self.profile.loss_logits
        each = LOSS_BYTES if self.profile.loss_sums == NO_SUMS else CUT_LOSS_BYTES
        scores = self.sees_gradients or config.pruning.method == "snip"
        made = [4, SCORED_BYTES * (scores and self.on_host), GATHERED_BYTES * (full is not self)]
        sums = [*(layer.sums for layer in layers), *[self.profile.loss_sums] * is_last]
        load = StageLoad(
            layers="",
            sum_bytes=8 if config.samo.gradient == "exact" else None,
            numbers=numbers,
            flops=sum(layer.flops for layer in layers),
            moved=_moved(layers),
            again_flops=sum(layer.flops for layer in again),
            again_moved=_moved(again),
            trained=sum(map(_trained, layers)),
            kept=sum(self._kept(layer) for layer in layers),
            state=stage_bytes(layers, self.profile.ties, self.kept, stored),
            temporary=width * _most_trained(layers, LARGEST_KEPT / width * self.on_host),
            building=drawn + max(made) * _largest(uncut),
            saved=full._saved(uncut, g_data),
            held=held,
            working=working,
            outputs=outputs,
            calibration=calibration,
            deferred=deferred,
            expanded=sum(self._expanded(layer, stored) for layer in layers),
            gathered=self._gathered(layers, stored),
            weight_flops=sum(each.weight_flops for each in _costs(layers)),
            forward_sums=sum((each.forward for each in sums), NO_SUM),
            backward_sums=sum(
                [each.backward for each in sums] + [layer.sums.again for layer in again], NO_SUM
            ),
            loss_bytes=partial(_loss_bytes, outputs / width, each, logits) if is_last else no_bytes,
        )
        teacher = self.profile.teacher
        return load if teacher is None else self._taught(load, teacher, numbers, stored)

    def _taught(
        self, load: StageLoad, teacher: ModelProfile, numbers: range, stored: StateFormat
    ) -> StageLoad:
        """The load of these layers with the teacher's layers next to them, which have weights and
        no other state, and of whose forward nothing is kept but what they hand on."""
        taught = self.profile.taught_by(numbers)
        *_, before = None, *self.profile.taught_by(range(numbers.stop))
        costs = None if before is None else before.activations
        hints = 0 if costs is None else costs.outputs
        weights = stage_bytes(
            list(map(_frozen, taught)), teacher.ties, {}, replace(stored, offload=False)
        )
        loss, is_last = load.loss_bytes, numbers.stop == len(self.profile.layers)
        if is_last:
            given = (load.outputs + hints) / stored.weight.itemsize
            loss = partial(_loss_bytes, given, DISTILLED_BYTES, self.profile.loss_logits)
        return replace(
            load,
            state=load.state + weights,
            building=max(load.building, 4 * _largest(taught)),
            working=max(load.working, _passing(taught) - load.held) + hints,
            outputs=load.outputs + hints,
            taught_flops=sum(layer.flops for layer in taught),
            taught_moved=_moved(taught),
            loss_bytes=loss,
        )

    def with_values(self, values: Mapping[str, object]) -> ProfiledModel:
        return replace(self, config=self.config.with_values(values))

    def _expanded(self, layer: LayerInfo, stored: StateFormat) -> int:
        """Bytes of a layer's weights that are sparse at rest, once dense."""
        if stored.weights == "dense":
            return 0
        ties, kept = self.profile.ties, self.kept
        pruned = (p for p in layer.parameters if ties.get(p.name, p.name) in kept)
        return stored.weight.itemsize * sum(p.numel for p in pruned)

    def _gathered(self, layers: Sequence[LayerInfo], stored: StateFormat) -> int:
        """Bytes of the kept entries of layers whose weights are gathered."""
        kept = [self._kept(layer) for layer in layers if self._expanded(layer, stored)]
        return stored.holds_none * stored.weight.itemsize * sum(kept)

    def _saved(self, layers: Sequence[LayerInfo], writers: int) -> float:
        """The most bytes that a checkpoint holds in memory at a time.

        Each layer goes to the writer with least so far, so that no writer has more than an equal
        share and the largest layer. A copy that waits for space in the buffer comes on top of it.
        """
        buffer = copied_bytes(self.config) if self.on_host else 0.0
        if not buffer:
            return 0.0
        sizes: list[int] = []
        largest, stored = 0, value_bytes(self.precision)
        for layer in layers:
            sizes.append(0)
            for parameter in layer.parameters:
                if parameter.name in self.profile.ties:
                    continue
                # A frozen tensor is saved as it was given (`given_value`).
                given = parameter.dtype.itemsize if self.profile.start else 0
                size, copies = max(stored, given) * parameter.numel, 1
                if parameter.trained:
                    size = 4 * self.kept.get(parameter.name, parameter.numel)
                    copies += len(self.optimizer.moments)
                sizes[-1] += copies * size
                largest = max(largest, size)
        share = min(sum(sizes), sum(sizes) / writers + max(sizes))
        return min(share, buffer + largest)

    @cached_property
    def last_pruned(self) -> int:
        """The number of the last layer of which something is pruned; -1 if nothing is."""
        layers = self.profile.layers
        pruned = (
            n for n, each in enumerate(layers) if any(p.name in self.kept for p in each.parameters)
        )
        return max(pruned, default=-1)

    def after_last_pruned(self, stored: StateFormat) -> tuple[float, float, float]:
        """Bytes of the layers after the last pruned layer: their state, in the format that is
        `stored` while masks are drawn; the same while they are built; and what a sample leaves in
        them and in the loss."""
        logits, after = self.profile.loss_logits, self.profile.layers[self.last_pruned + 1 :]
        state = stage_bytes(list(map(_frozen, after)), self.profile.ties, {}, stored).total
        loss = _loss_bytes(0.0, LOSS_BYTES, logits, 1)
        each = _costs(after)
        widest = max((costs.widest for costs in each), default=0)
        passing = loss + sum(costs.saved + costs.outputs for costs in each) + 2 * widest
        return state, state + _made(after), passing

    def _kept(self, layer: LayerInfo) -> int:
        ties = self.profile.ties
        return sum(
            self.kept.get(ties.get(parameter.name, parameter.name), parameter.numel)
            for parameter in layer.parameters
            if parameter.trained
        )


def _loss_bytes(
    outputs: float, each: int, logits: Callable[[int], int] | None, samples: int
) -> float:
    computed = 0.0 if logits is None else float(each * logits(samples))
    return samples * outputs * LOSS_BYTES + computed


def _passing(layers: Sequence[LayerInfo]) -> int:
    """The most bytes that a sample has in a forward of which nothing is kept, within one layer."""
    return max((each.inputs + each.saved + each.outputs for each in _costs(layers)), default=0)


def _trained(layer: LayerInfo) -> int:
    return sum(parameter.numel for parameter in layer.parameters if parameter.trained)


def _most_trained(layers: Sequence[LayerInfo], kept: float) -> int:
    """The most entries of dense gradients in memory: one layer's, and next to its tensors of more
    than `kept` entries another layer's freed smaller ones, which the C library keeps."""
    parts = []
    for layer in layers:
        sizes = [parameter.numel for parameter in layer.parameters if parameter.trained]
        small = sum(size for size in sizes if size <= kept)
        parts.append((small, sum(sizes) - small))
    return sum(map(max, zip(*parts, strict=True)))


def _moved(layers: Sequence[LayerInfo]) -> float:
    """Bytes that a sample's forward writes; `LayerInfo.work` counts them in the same way."""
    return float(sum(each.saved + each.outputs for each in _costs(layers)))


def _costs(layers: Sequence[LayerInfo]) -> list[Activations]:
    return [layer.activations for layer in layers if layer.activations is not None]
