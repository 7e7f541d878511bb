"""A surveyed model as a workload of the planner: its layers, split as a run would split them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from axsparse.models.layer_cost import Activations
from axsparse.models.survey import LayerInfo, Survey
from axsparse.pipeline.partition import partition, split_by_hand
from axsparse.planner.cluster import Precision
from axsparse.planner.stage_memory import held_activations, is_recomputed
from axsparse.planner.workload import Fits, StageLoad, no_bytes, value_bytes
from axsparse.pruning.input_statistics import METHODS
from axsparse.samo.precision import accumulates_in_half
from axsparse.samo.stage_bytes import stage_bytes
from axsparse.samo.state_bytes import IndexKind, StateFormat

LOSS_BYTES = 8
"""Bytes that the loss takes for each number of the last layer's output, and for each logit that
the loss computes itself: two fp32 numbers, a copy and its gradient. A loss that works in chunks was
measured to take 5 bytes a logit in fp32 and 6.5 in bf16."""


CHOSEN_BYTES = 16
"""Bytes that torch takes for each entry which it picks out of a matrix by a mask."""


@dataclass(frozen=True)
class CalibrationMemory:
    """Bytes of one stage while its masks are drawn from samples."""

    moments: Sequence[tuple[float, float]] = ((0.0, 0.0),)
    """Of each moment that may be the fullest, what does not depend on the microbatch size, and what
    each sample of a microbatch takes."""
    drawn: float = 0.0
    """The masks and changed weights of the whole stage, which stay until its state is built."""

    def peak(self, samples: int) -> float:
        """The most bytes at a time with microbatches of so many samples."""
        return max(fixed + samples * passing for fixed, passing in self.moments)


@dataclass(frozen=True)
class CalibrationPlan:
    """How masks are drawn, layer by layer, before a stage has any state
    (`pruning.calibration.Calibration`)."""

    method: str
    """One of `input_statistics.METHODS`."""
    samples: int
    on_host: bool
    """Whether the memory that is planned is the host's, where masks lie until state is built."""

    def memory(
        self,
        layers: Sequence[LayerInfo],
        ties: Mapping[str, str],
        kept: Mapping[str, int],
        stored: StateFormat,
    ) -> CalibrationMemory:
        """The memory of a stage of these layers; `kept` and `stored` are those of its state.

        A layer stands there dense and without moments. It has the activations of all samples, the
        statistics of all of its matrices, and works on one of these at a time.
        """
        method, dense = METHODS[self.method], replace(stored, moments=0, replicas=1)
        drawn, moments = 0.0, []
        for layer in layers:
            costs = layer.activations or Activations(0, 0, 0, 0)
            matrices = [p for p in layer.parameters if p.name in kept]
            there = stage_bytes([layer], ties, {}, dense).total + drawn * self.on_host
            there += self.samples * max(costs.inputs, costs.outputs)
            statistics = sum(method.held(p.shape[1]) for p in matrices)
            working = max((self._working(p.shape, kept[p.name]) for p in matrices), default=0)
            moments.append((there + statistics + working, 0.0))
            # The samples pass while statistics are gathered, and once more when they are gone.
            moments.append((there + statistics, costs.saved + costs.outputs))
            for matrix in matrices:
                changed = stored.weight_bytes * kept[matrix.name] if method.changes_weights else 0
                drawn += matrix.numel / 8 + changed
        return CalibrationMemory(moments, drawn * self.on_host)

    def _working(self, shape: tuple[int, ...], kept: int) -> int:
        """Bytes of pruning one matrix, and of keeping the weights that it has changed."""
        method, entries = METHODS[self.method], shape[0] * shape[1]
        if not method.changes_weights:
            return method.working(shape)
        return max(method.working(shape), 5 * entries + CHOSEN_BYTES * kept)


@dataclass(frozen=True, kw_only=True)
class SurveyedModel:
    """Any model whose survey has costs, as axsparse trains it. A `Workload`."""

    name: str
    survey: Survey
    kept: Mapping[str, int]
    """How many entries each pruned tensor keeps, by the name of the weight's first use; empty if
    nothing is pruned."""
    precision: Precision
    gradient: Precision | Literal["auto"]
    """Precision in which gradients add up; `auto` depends on the number of microbatches."""
    moments: int
    """How many moments the optimizer has."""
    index: IndexKind
    split_master: bool = False
    shard_optimizer: bool = False
    offload: bool = False
    """Whether masters and moments are kept in the hosts' memory."""
    checkpoint_activations: int = 0
    """Every k-th layer of a stage is recomputed in the backward; 0: none."""
    checkpoint_buffer: float = 0.0
    """Bytes for checkpoint copies in the memory that is planned; 0 if nothing is saved before
    training ends, or if the copies are in other memory."""
    split: Sequence[int] | None = None
    """Number of layers of each stage; None balances their work."""
    calibration: CalibrationPlan | None = None
    """How masks are drawn from samples before the first step; None: they are not."""
    _loads: dict[tuple[range, int, int, Precision], StageLoad] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def is_pruned(self) -> bool:
        return bool(self.kept)

    @property
    def most_stages(self) -> int:
        return len(self.survey.layers)

    @property
    def sample_flops(self) -> float:
        """Three times the forward's flops, four times those of recomputed layers."""
        every = self.checkpoint_activations
        again = sum(
            layer.flops for n, layer in enumerate(self.survey.layers) if is_recomputed(n, every)
        )
        return 3 * self.survey.flops + again

    def stages(
        self, g_inter: int, g_data: int, fits: Fits | None = None, *, microbatches: int = 1
    ) -> list[StageLoad] | None:
        found = self.ranges(g_inter, g_data, fits, microbatches=microbatches)
        if found is None:
            return None
        return [self._load(layers, *self._variant(g_data, microbatches)) for layers in found]

    def ranges(
        self, g_inter: int, g_data: int, fits: Fits | None = None, *, microbatches: int = 1
    ) -> list[range] | None:
        """The layers of each stage; takes what `stages` takes, and returns None where that does."""
        variant = self._variant(g_data, microbatches)

        def has_room(stage: int, layers: range) -> bool:
            return fits is None or fits(stage, self._load(layers, *variant))

        if self.split is None:
            work = [layer.work for layer in self.survey.layers]
            return partition(work, g_inter, None if fits is None else has_room)
        found = split_by_hand(self.split)
        assert len(found) == g_inter, "a split says how many stages"
        fit = all(has_room(stage, layers) for stage, layers in enumerate(found))
        return found if fit else None

    def _variant(self, g_data: int, microbatches: int) -> tuple[int, int, Precision]:
        """What a load depends on beside its layers: how many replicas share the optimizer's state,
        how many write a checkpoint together, and the precision in which gradients add up."""
        gradient: Precision = "fp32"
        if self.gradient != "auto":
            gradient = self.gradient
        elif accumulates_in_half(microbatches):
            gradient = self.precision
        writers = g_data if self.checkpoint_buffer else 1
        return g_data if self.shard_optimizer else 1, writers, gradient

    def _load(self, held: range, replicas: int, writers: int, gradient: Precision) -> StageLoad:
        """The load of these layers, remembered, since the search for a split asks repeatedly."""
        key = (held, replicas, writers, gradient)
        if key not in self._loads:
            self._loads[key] = self._new_load(held, replicas, writers, gradient)
        return self._loads[key]

    def _new_load(self, held: range, replicas: int, writers: int, gradient: Precision) -> StageLoad:
        layers = [self.survey.layers[number] for number in held]
        again = [
            layer
            for number, layer in enumerate(layers)
            if is_recomputed(number, self.checkpoint_activations)
        ]
        width = value_bytes(self.precision)
        last = layers[-1].activations
        outputs = 0 if last is None else last.outputs
        is_last = held.stop == len(self.survey.layers)
        activations = held_activations(layers, self.checkpoint_activations)
        stored = StateFormat(
            half=self.precision != "fp32",
            gradient_bytes=value_bytes(gradient),
            moments=self.moments,
            index=self.index,
            split_master=self.split_master,
            replicas=replicas,
            offload=self.offload,
        )
        calibration = CalibrationMemory()
        if self.calibration is not None:
            calibration = self.calibration.memory(layers, self.survey.ties, self.kept, stored)
        logits = self.survey.loss_logits if is_last else None
        return StageLoad(
            layers=layers[0].name if len(layers) == 1 else f"{layers[0].name}–{layers[-1].name}",
            flops=sum(layer.flops for layer in layers),
            moved=_moved(layers),
            again_flops=sum(layer.flops for layer in again),
            again_moved=_moved(again),
            trained=sum(map(_trained, layers)),
            kept=sum(self._kept(layer) for layer in layers),
            state=stage_bytes(layers, self.survey.ties, self.kept, stored),
            temporary=width * max(map(_trained, layers)),
            building=calibration.drawn
            + 4 * max((p.numel for layer in layers for p in layer.parameters), default=0),
            saved=self._saved(layers, writers),
            held=activations.held,
            working=activations.working,
            logits=outputs / width * LOSS_BYTES if is_last else 0.0,
            outputs=outputs,
            calibration=calibration.peak,
            deferred=activations.deferred,
            weight_flops=sum(each.weight_flops for each in _costs(layers)),
            loss_bytes=no_bytes if logits is None else partial(_loss_bytes, logits),
        )

    def _saved(self, layers: Sequence[LayerInfo], writers: int) -> float:
        """The most bytes that a checkpoint holds in memory at a time.

        Masters and moments are saved in fp32, and what is not trained as it is, each tensor once.
        Each layer goes to the writer with least so far, so that no writer has more than an equal
        share and the largest layer. A copy that waits for room in the buffer comes on top of it.
        """
        if not self.checkpoint_buffer:
            return 0.0
        own: list[int] = []
        largest = 0
        for layer in layers:
            own.append(0)
            for parameter in layer.parameters:
                if parameter.name in self.survey.ties:
                    continue
                size, copies = value_bytes(self.precision) * parameter.numel, 1
                if parameter.trained:
                    size = 4 * self.kept.get(parameter.name, parameter.numel)
                    copies += self.moments
                own[-1] += copies * size
                largest = max(largest, size)
        share = min(sum(own), sum(own) / writers + max(own))
        return min(share, self.checkpoint_buffer + largest)

    def _kept(self, layer: LayerInfo) -> int:
        ties = self.survey.ties
        return sum(
            self.kept.get(ties.get(parameter.name, parameter.name), parameter.numel)
            for parameter in layer.parameters
            if parameter.trained
        )


def _loss_bytes(logits: Callable[[int], int], samples: int) -> float:
    return float(LOSS_BYTES * logits(samples))


def _trained(layer: LayerInfo) -> int:
    return sum(parameter.numel for parameter in layer.parameters if parameter.trained)


def _moved(layers: Sequence[LayerInfo]) -> float:
    """Bytes that a sample's forward writes; the survey's `work` counts them in the same way."""
    return float(sum(each.saved + each.outputs for each in _costs(layers)))


def _costs(layers: Sequence[LayerInfo]) -> list[Activations]:
    return [layer.activations for layer in layers if layer.activations is not None]
