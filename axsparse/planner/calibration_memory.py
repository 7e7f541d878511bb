"""The memory of a stage while its masks are drawn from calibration samples.

`pruning.calibration.Calibration` does it, layer by layer, before the stage has any state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from axsparse.models.layer_cost import Activations
from axsparse.models.survey import LayerInfo
from axsparse.pruning.input_statistics import METHODS
from axsparse.samo.state_bytes import StateFormat, stage_bytes

CHOSEN_BYTES = 16
"""Bytes that torch takes for each entry which it picks out of a matrix by a mask."""


@dataclass(frozen=True)
class CalibrationMemory:
    """Bytes of one stage."""

    fixed: Sequence[float]
    """For each layer, what does not depend on the microbatch size."""
    passing: Sequence[float]
    """For each layer, what one sample of a microbatch takes while it passes through it."""
    drawn: float
    """The masks and changed weights of the whole stage, which stay until its state is built."""

    def peak(self, samples: int) -> float:
        """The most bytes at a time with microbatches of so many samples."""
        return max(
            fixed + samples * passing
            for fixed, passing in zip(self.fixed, self.passing, strict=True)
        )


@dataclass(frozen=True)
class CalibrationPlan:
    """How masks are drawn."""

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
        statistics of all of its matrices, and works on one of these at a time. One microbatch is
        there twice, since it also passes through the layers as they were before.
        """
        method, dense = METHODS[self.method], replace(stored, moments=0, replicas=1)
        drawn, fixed, passing = 0.0, [], []
        for layer in layers:
            costs = layer.activations or Activations(0, 0, 0, 0)
            matrices = [p for p in layer.parameters if p.name in kept]
            there = stage_bytes([layer], ties, {}, dense).total + drawn * self.on_host
            there += self.samples * max(costs.inputs, costs.outputs)
            statistics = sum(method.held(p.shape[1]) for p in matrices)
            working = max((self._working(p.shape, kept[p.name]) for p in matrices), default=0)
            fixed.append(there + statistics + working)
            twice = max(costs.inputs, costs.outputs)
            passing.append(twice)
            # The samples pass while statistics are gathered, and once more when they are gone.
            fixed.append(there + statistics)
            passing.append(twice + costs.saved + costs.outputs)
            for matrix in matrices:
                changed = stored.weight_bytes * kept[matrix.name] if method.changes_weights else 0
                drawn += matrix.numel / 8 + changed
        return CalibrationMemory(fixed, passing, drawn * self.on_host)

    def _working(self, shape: tuple[int, ...], kept: int) -> int:
        """Bytes of pruning one matrix, and of keeping the weights that it has changed."""
        method, entries = METHODS[self.method], shape[0] * shape[1]
        if not method.changes_weights:
            return method.working(shape)
        return max(method.working(shape), 5 * entries + CHOSEN_BYTES * kept)
