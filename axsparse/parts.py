"""What one rank trains with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from axsparse.comm import Link, Transport
from axsparse.data.batches import Batches
from axsparse.data_parallel.buffers import StageBuffers
from axsparse.data_parallel.sharded import WeightGather
from axsparse.data_parallel.sync import GradientSync
from axsparse.grid import Place
from axsparse.masking.change import Masking
from axsparse.masking.live import Live
from axsparse.models.survey import Survey
from axsparse.observe.phases import Phases
from axsparse.observe.pulse import Pulse
from axsparse.observe.recorder import Recorder
from axsparse.pipeline.engine import Engine
from axsparse.samo.construct import BuiltLayer
from axsparse.samo.gradient import GradientCollector
from axsparse.samo.loss_scale import LossScale
from axsparse.samo.memory import StateBytes
from axsparse.samo.offload import Offload
from axsparse.samo.optimizer import Optimizer
from axsparse.samo.shards import Replicas


@dataclass(frozen=True)
class Parts:
    """What a trainer works with; `build` puts it together."""

    transport: Transport
    place: Place
    survey: Survey
    stage_of: Callable[[str], int]
    """The stage that holds a parameter."""
    layers: Sequence[BuiltLayer]
    engine: Engine
    link: Link
    collector: GradientCollector
    sync: GradientSync
    weights: WeightGather
    buffers: StageBuffers
    replicas: Replicas
    """This rank among the replicas of its stage, for agreements and the exchange of state."""
    optimizer: Optimizer
    offload: Offload | None
    """Brings masters and moments from the host for their update; None if they stay here."""
    loss_scale: LossScale
    live: Live | None
    """What is pruned of this rank's layers; None where nothing ever is."""
    masking: Masking | None
    """Draws and changes masks between steps; None leaves them."""
    training: Batches
    validation: Batches | None
    metrics: Sequence[str]
    """Names of the model's metrics, which the last stage counts."""
    phases: Phases
    pulse: Pulse
    """Where this rank stands, for its watchdog."""
    recorder: Recorder
    peak_memory_bytes: Callable[[], int]
    """The most that this rank has held where it computes."""
    run_dir: Path | None
    """Where the run writes; None if it does not."""

    def state_bytes(self) -> StateBytes:
        """Bytes of this rank's live model state."""
        state = StateBytes.sum(layer.state.live_bytes() for layer in self.layers)
        return state if self.offload is None else state + StateBytes(visiting=self.offload.nbytes)
