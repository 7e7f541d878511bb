"""The parts that one rank trains with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from axsparse.data.batches import Batches
from axsparse.data_parallel.gradient_sync import GradientSync
from axsparse.data_parallel.running_statistics import RunningStatistics
from axsparse.data_parallel.weight_gather import WeightGather
from axsparse.models.layer import Model
from axsparse.models.survey import Survey
from axsparse.observe.phases import Phases
from axsparse.observe.recorder import Recorder
from axsparse.observe.watchdog.activity import Activity
from axsparse.pipeline.engine import Engine
from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.methods.masking import Masking
from axsparse.runtime.communication import Link, Transport
from axsparse.runtime.grid import Place
from axsparse.samo.gradient_hooks import GradientCollector
from axsparse.samo.layer_construction import BuiltLayer
from axsparse.samo.offload import Offload
from axsparse.samo.optim.loss_scale import LossScale
from axsparse.samo.optim.optimizer import Optimizer
from axsparse.samo.shards import Replicas
from axsparse.samo.state_bytes import StateBytes
from axsparse.training.parameter_groups import ParameterGroups


@dataclass(frozen=True)
class Parts:
    """All that a trainer works with on one rank; `assembly.py` puts it together."""

    transport: Transport
    place: Place
    model: Model
    survey: Survey
    stage_of: Callable[[str], int]
    """Gives the stage that holds a parameter, by the parameter's global name."""
    layers: Sequence[BuiltLayer]
    engine: Engine
    link: Link
    collector: GradientCollector
    sync: GradientSync
    weights: WeightGather
    statistics: RunningStatistics
    replicas: Replicas
    """The replicas of this stage, by which they agree and exchange state."""
    optimizer: Optimizer
    groups: ParameterGroups
    """The parameters that have learning rates and weight decays of their own."""
    offload: Offload | None
    """Brings masters and moments from the host for their update; None if they stay here."""
    loss_scale: LossScale
    live: LiveMasks | None
    """What is pruned of this rank's layers; None where nothing ever is."""
    masking: Masking | None
    """Draws and changes masks between steps; None leaves them as they are."""
    training: Batches
    validation: Batches | None
    metrics: Sequence[str]
    """Names of the model's metrics, which the last stage counts."""
    phases: Phases
    activity: Activity
    """Tells the watchdog what this rank is doing."""
    recorder: Recorder
    peak_memory_bytes: Callable[[], int]
    """Gives the most memory, in bytes, that this rank has held where it computes."""
    run_dir: Path | None
    """The directory that the run writes to; None if it writes nothing."""

    def state_bytes(self) -> StateBytes:
        """Bytes of this rank's live model state."""
        state = StateBytes.sum(layer.state.live_bytes() for layer in self.layers)
        return state if self.offload is None else state + StateBytes(visiting=self.offload.nbytes)
