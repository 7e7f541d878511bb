"""The parts of one rank, each given the others that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from axsparse.comm import Collective, Transport
from axsparse.data_parallel.buffers import StageBuffers
from axsparse.data_parallel.sharded import WeightGather
from axsparse.data_parallel.sync import GradientSync, StageTie, Use
from axsparse.masking.choose import choose_masking
from axsparse.masking.live import Live
from axsparse.models.layer import Model
from axsparse.observe.device_phases import make_phases
from axsparse.observe.pulse import Pulse
from axsparse.observe.recorder import Recorder
from axsparse.parts import Parts
from axsparse.pipeline.engine import Engine
from axsparse.pipeline.schedules import Schedule
from axsparse.pipeline.stage import Stage
from axsparse.placing import Placed
from axsparse.resolve import Resolved, loss_scale
from axsparse.samo.construct import BuiltLayer, StateOptions
from axsparse.samo.gradient import GradientCollector
from axsparse.samo.offload import Offload
from axsparse.startup import Data


def join(
    run: Resolved,
    model: Model,
    layers: list[BuiltLayer],
    options: StateOptions,
    data: Data,
    placed: Placed,
    recorder: Recorder,
    run_dir: Path | None,
) -> Parts:
    """What this rank trains with. All ranks call this together: they open their links."""
    place, config, replicas = run.place, run.config, options.replicas
    phases = make_phases(placed.gpu, nvtx=config.train.nvtx)
    transport = placed.transport
    states = [layer.state for layer in layers]
    column = place.grid.column(place.stage)
    gradients = transport.collective(f"gradients of stage {place.stage}", column)
    ties = _stage_ties(run, layers, transport)
    sync = GradientSync(
        states,
        ties,
        replicas=gradients,
        wire_dtype=run.dtype,
        backoff=transport.backoff,
        phases=phases,
    )
    stage = Stage(
        layers,
        loss=model.loss if place.is_last else None,
        metrics=model.metrics if place.is_last else {},
        input_dtype=run.dtype if place.is_first else None,
        seed=config.seed,
        checkpoint_activations=config.pipeline.checkpoint_activations,
        compiled=config.pipeline.compile,
    )
    offload = None
    if config.samo.offload and placed.gpu is not None:
        offload = Offload(placed.gpu, states, transport.backoff)
    link = transport.link(place)
    pipeline = config.pipeline
    assert pipeline.slack != "auto"
    engine = Engine(
        place,
        stage,
        link,
        transport.backoff,
        phases,
        schedule=Schedule(pipeline.schedule, pipeline.slack, pipeline.prefer),
        while_idle=sync.advance,
        gpu=placed.gpu,
    )
    collector = GradientCollector(states, sync.ready, lambda: phases("compress"))

    live = None
    if run.targets is not None:
        pattern = run.criterion.pattern
        live = Live(layers, run.survey.ties, run.targets, pattern, options, place, transport)
    return Parts(
        transport=transport,
        place=place,
        survey=run.survey,
        stage_of=run.stage_of,
        layers=layers,
        engine=engine,
        link=link,
        collector=collector,
        sync=sync,
        replicas=replicas,
        weights=WeightGather(gradients, transport.backoff, phases),
        buffers=StageBuffers([layer.module for layer in layers], replicas),
        optimizer=run.optimizer,
        offload=offload,
        loss_scale=loss_scale(config),
        live=live,
        masking=None if live is None else choose_masking(run, live, collector, ties),
        training=data.training,
        validation=data.validation,
        metrics=tuple(model.metrics),
        phases=phases,
        pulse=Pulse(phases, transport.backoff, engine.awaited),
        recorder=recorder,
        peak_memory_bytes=placed.peak_memory_bytes,
        run_dir=run_dir,
    )


def _stage_ties(
    run: Resolved, layers: Sequence[BuiltLayer], transport: Transport
) -> list[StageTie]:
    """The ties with a use on this stage, in an order that all stages share."""
    place = run.place
    tensors = {
        tensor.name: Use(layer.state, tensor) for layer in layers for tensor in layer.state.tensors
    }
    pairs: dict[tuple[int, int], Collective] = {}
    found = []
    for second, first in run.survey.ties.items():
        uses = tuple(tensors[name] for name in (first, second) if name in tensors)
        if not uses:  # on other stages, or frozen
            continue
        stages = (run.stage_of(first), run.stage_of(second))
        if stages[0] != stages[1] and stages not in pairs:
            ranks = [place.grid.rank(stage, place.replica) for stage in stages]
            pairs[stages] = transport.collective(f"tie {first}", ranks)
        found.append(StageTie(uses, pairs.get(stages)))
    return found
