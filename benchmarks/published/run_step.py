"""Predicts a run: its step by compute, messages, collectives and bubble, and its fullest device.

For each microbatch on a device, with the flops and bytes of `transformer`:

    compute      flops / (e peak) + traffic * bytes / memory bandwidth
    backward     twice the forward, and what is recomputed
    within a layer  an all-reduce of 2 b s h bytes over the tensor group, in the open
    message      2 b s h bytes, of which the sender and the receiver each have the cost; where t
                 devices share a layer, each sends its part and the receivers gather them, if the
                 cluster's software does so (`SOFTWARE`)

and once a step, over D replicas: an all-reduce of the gradients (or under ZeRO-1 a reduce-scatter
of the gradients and an all-gather of the weights), the sum of a tied weight's two gradients, the
gradient norm, and the optimizer's bytes over the memory bandwidth.

Activations follow Korthikanti et al. (2022) by the kind of recomputation, for as many microbatches
as the schedule holds. The prediction is for the report of a training's allocator; the verdict adds
the rest: the libraries' share and the allocator's gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axsparse.pipeline.policy import Schedule
from axsparse.pipeline.simulator import Durations, MessageCost, PipelineRun, simulate
from axsparse.planner.cluster import Cluster
from axsparse.planner.stage_memory import most_in_flight, value_bytes
from axsparse.planner.step_cost import StageSeconds, StepCosts, StepRun, joined_step, ring_seconds
from published.interleaved import simulate_interleaved, warm_up
from published.piece_loads import NodePlacement, PieceLoad, pieces, stage_pieces, transformer
from published.run_file import RunRow
from published.transformer import Work


@dataclass(frozen=True)
class Software:
    """The software by which runs on a cluster were published."""

    message_overhead: float = 0.0
    """Seconds that sending or receiving a message takes from a stage whatever its bytes, as its
    host waits for the device before it launches the next kernels."""
    scattered_messages: bool = False
    """Whether the devices that share a layer each send their part of a message to the next stage;
    else each sends all of it."""


SOFTWARE = {
    # Megatron-LM waits for the device after each exchange with a neighbour, which is the usual time
    # of launching onto an idle device, and scatters (Narayanan et al., 2021, section 4.1).
    "selene-a100": Software(2e-4, scattered_messages=True),
    "a100-roce": Software(2e-4, scattered_messages=True),
    # Not reported; three layouts of DLPerf's report ask for it: docs/reference/scoreboard.md.
    "v100-edr": Software(2e-4),
}
"""By the name of the cluster; for others, messages cost their bytes alone."""

UPDATE_BYTES = 2 * (4 + 4 + 4) + 4
"""Bytes an entry for AdamW: masters and both moments are read and written, gradients read."""
GRADIENT_PASSES = 4 + 8 + 4 + 8
"""Further bytes an entry: an fp32 copy of the gradient is written, unscaled, summed for the norm
and clipped, each by a separate kernel. axsparse does all in one pass."""


@dataclass(frozen=True)
class RunCosts:
    """The seconds of a run's parts, by stage and piece."""

    forward: Sequence[Sequence[float]]
    backward: Sequence[Sequence[float]]
    compress: Sequence[float]
    edges: Sequence[Sequence[MessageCost]]
    """For each kind of replica, the edges between stages; the last one leads back to the first."""
    all_reduce: Sequence[float]
    optimizer: Sequence[float]


def run_costs(row: RunRow, cluster: Cluster) -> RunCosts:
    """The seconds of all parts of a run."""
    model = transformer(row)
    layout = row.layout
    loads = [PieceLoad(model, piece, row) for piece in pieces(row, model)]
    stages = stage_pieces(loads, layout.pipeline)
    placed = placement(row, cluster)
    tensor = _tensor_seconds(row, cluster, placed)
    times = [[_piece_seconds(load, cluster, placed) for load in stage] for stage in stages]
    forward, backward = (
        [
            [time[way] + load.reduces[way] * tensor for load, time in zip(*pair, strict=True)]
            for pair in zip(stages, times, strict=True)
        ]
        for way in (0, 1)
    )
    compress = [
        sum(load.params for load in s) / cluster.compression_rate if row.training.sparsity else 0.0
        for s in stages
    ]
    for stage, seconds in enumerate(compress):
        backward[stage] = [each + seconds / layout.chunks for each in backward[stage]]
    if row.profiled is not None:
        forward = _as_profiled(forward, row.profiled.forward)
        backward = _as_profiled(backward, row.profiled.backward)
    return RunCosts(
        forward=forward,
        backward=backward,
        compress=compress,
        edges=[_edges(row, cluster, placed, crosses) for crosses in placed.kinds()],
        all_reduce=[_reduction(row, cluster, placed, s, number) for number, s in enumerate(stages)],
        optimizer=[_optimizer(row, cluster, s) for s in stages],
    )


def predict_step(row: RunRow, cluster: Cluster) -> StepRun:
    """Play a step of a run."""
    costs = run_costs(row, cluster)
    layout, microbatches = row.layout, row.microbatches
    runs: dict[int, PipelineRun] = {}
    for kind, edges in enumerate(costs.edges):
        if layout.chunks > 1 and layout.pipeline > 1:
            runs[kind] = simulate_interleaved(costs.forward, costs.backward, edges, microbatches)
        else:
            runs[kind] = _simulate_plain(row, costs, edges)
    seconds = [
        StageSeconds(sum(f), sum(b), c)
        for f, b, c in zip(costs.forward, costs.backward, costs.compress, strict=True)
    ]
    return joined_step(
        StepCosts(seconds, [], costs.all_reduce, costs.optimizer), runs, microbatches
    )


def _simulate_plain(row: RunRow, costs: RunCosts, edges: Sequence[MessageCost]) -> PipelineRun:
    """Play the policies of a schedule whose stages hold one piece each."""
    schedule, microbatches = schedule_of(row), row.microbatches
    times = Durations(
        [[sum(each)] * microbatches for each in costs.forward],
        [[sum(each)] * microbatches for each in costs.backward],
    )
    return simulate(
        lambda stage: schedule.policy(
            stage=stage, g_inter=row.layout.pipeline, microbatches=microbatches
        ),
        times,
        edges[:-1],
    )


def schedule_of(row: RunRow) -> Schedule:
    """The schedule of a run without chunks."""
    extra_in_flight = row.training.extra_in_flight
    if row.training.schedule == "message-driven":
        return Schedule("message-driven", 1 if extra_in_flight is None else extra_in_flight)
    return Schedule(row.training.schedule, extra_in_flight or 0)


def placement(row: RunRow, cluster: Cluster) -> NodePlacement:
    """Where the ranks of a run stand."""
    layout, order = row.layout, row.layout.order
    if order is None:
        is_ours = row.training.schedule == "message-driven"
        order = "tensor-pipeline-data" if is_ours else "tensor-data-pipeline"
    return NodePlacement(
        data=layout.data,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        gpus_per_node=cluster.gpus_per_node,
        pipeline_first=order == "tensor-pipeline-data",
    )


def compute_seconds(row: RunRow, cluster: Cluster, work: Work) -> float:
    """Seconds of a device for this work."""
    rate = cluster.efficiency * cluster.peak(row.training.precision)
    # Bytes are counted for values of two.
    moved = value_bytes(row.training.precision) / 2 * work.moved
    return work.flops / rate + (cluster.traffic or 0.0) * moved / cluster.memory_bandwidth


def _piece_seconds(load: PieceLoad, cluster: Cluster, placed: NodePlacement) -> tuple[float, float]:
    """Seconds of a piece's forward and backward, without what is exchanged within layers."""
    forward = compute_seconds(load.row, cluster, load.forward)
    backward = compute_seconds(load.row, cluster, load.forward.times(2).plus(load.again))
    if load.row.training.zero < 3:
        return forward, backward
    # ZeRO-3 gathers the weights for both, and reduces gradients in the backward, meanwhile.
    nbytes = value_bytes(load.row.training.precision) * load.kept
    gather = ring_seconds(nbytes, placed.data_group, cluster) / 2
    return max(forward, gather), max(backward, 2 * gather)


def _as_profiled(stages: Sequence[Sequence[float]], seconds: float) -> list[list[float]]:
    """Times in which a middle stage takes so long, and the others longer or shorter as before."""
    whole = sorted(sum(stage) for stage in stages)
    factor = seconds / whole[len(whole) // 2]
    return [[factor * each for each in stage] for stage in stages]


def _activation_bytes(row: RunRow) -> float:
    """Bytes of a microbatch between two blocks."""
    tokens = row.batch.micro * row.model.sequence_length
    return float(value_bytes(row.training.precision) * tokens * row.model.hidden_size)


# -- communication --------------------------------------------------------------------------


def _tensor_seconds(row: RunRow, cluster: Cluster, placed: NodePlacement) -> float:
    return ring_seconds(_activation_bytes(row), placed.tensor_group, cluster)


def _edges(
    row: RunRow, cluster: Cluster, placed: NodePlacement, crosses: Sequence[bool]
) -> list[MessageCost]:
    """The cost of a message on each edge of a replica's pipeline."""
    tensor, nbytes = row.layout.tensor, _activation_bytes(row)
    gather, share, software = 0.0, nbytes, SOFTWARE.get(cluster.name, Software())
    if tensor > 1 and transformer(row).sequence_parallel:
        share = nbytes / tensor  # each device has its part only
    elif tensor > 1 and software.scattered_messages:
        share = nbytes / tensor
        # Half an all-reduce, of which sender and receiver are each charged a half.
        gather = ring_seconds(nbytes, placed.tensor_group, cluster) / 4
    # A card sends and receives at once: of a transfer each side's time counts half.
    card = cluster.nic_bandwidth / placed.senders
    between = min(cluster.inter_node_bandwidth, 2 * card)
    found = []
    for out in crosses:
        rate, latency = cluster.intra_node_bandwidth, cluster.intra_node_latency
        if out:
            rate, latency = between, cluster.inter_node_latency
        carried = share / rate + gather
        if row.profiled is not None and not out:
            carried = row.profiled.message / 2
        found.append(MessageCost(latency, carried + software.message_overhead))
    return found


def _reduction(
    row: RunRow, cluster: Cluster, placed: NodePlacement, stage: Sequence[PieceLoad], number: int
) -> float:
    """Seconds in which the replicas of a stage bring their gradients together."""
    if row.training.zero == 3:
        return 0.0  # each backward has done it
    kept = sum(load.kept for load in stage)
    width = gradient_bytes(row)
    seconds = ring_seconds(width * kept, placed.data_group, cluster)
    if row.training.zero:
        weight = value_bytes(row.training.precision)
        gathered = ring_seconds(weight * kept, placed.data_group, cluster)
        seconds = (seconds + gathered) / 2
    last = row.layout.pipeline - 1
    model = stage[0].model
    if model.tied and last and number in (0, last) and row.layout.split != "fractions":
        words = width * model.word_params / row.layout.tensor
        seconds += ring_seconds(words, placed.ends, cluster)
    return seconds


def gradient_bytes(row: RunRow) -> int:
    """Bytes of a gradient that is reduced."""
    training = row.training
    if training.gradients is not None:
        return value_bytes(training.gradients)
    return 4 if training.precision == "bf16" else value_bytes(training.precision)


def _optimizer(row: RunRow, cluster: Cluster, stage: Sequence[PieceLoad]) -> float:
    """Seconds of the gradient norm and the update."""
    kept = sum(load.kept for load in stage)
    if row.training.zero:
        kept /= row.layout.data
    nbytes = UPDATE_BYTES + 2 * value_bytes(row.training.precision)
    if row.training.schedule != "message-driven":
        nbytes += GRADIENT_PASSES
    norm = 2 * (row.layout.tensor * row.layout.pipeline - 1) * cluster.ring_latency
    return kept * nbytes / cluster.memory_bandwidth + norm


MASTER_AND_MOMENTS = 12
"""Bytes an entry of AdamW's state in fp32."""
INDEX_BYTES = 2
"""Bytes of a kept entry's position, with indices of 16 bits in blocks."""
LOGIT_BYTES = 2 + 4 + 4
"""Bytes a logit: in half precision, in fp32, and its gradient."""
GAPS = 0.04
"""The part of the memory in use that gaps between blocks take on top, usual of torch."""


@dataclass(frozen=True)
class RunMemory:
    """Bytes of one device."""

    state: float
    activations: float
    working: float
    """Temporary memory of the backward of one block, or of the loss."""
    update: float
    """Copies of gradients in fp32, which the optimizer makes when activations are gone."""

    @property
    def total(self) -> float:
        return self.state + max(self.activations + self.working, self.update)

    def fits(self, cluster: Cluster) -> bool:
        """Whether a device of the cluster has memory for it and for the libraries."""
        return (1 + GAPS) * self.total + cluster.overhead_bytes <= cluster.memory_bytes


def predict_memory(row: RunRow) -> RunMemory:
    """The memory of the fullest device of a run."""
    model = transformer(row)
    loads = [PieceLoad(model, piece, row) for piece in pieces(row, model)]
    stages = stage_pieces(loads, row.layout.pipeline)
    found = [_stage(row, stage, number) for number, stage in enumerate(stages)]
    return max(found, key=lambda memory: memory.total)


def _stage(row: RunRow, stage: Sequence[PieceLoad], number: int) -> RunMemory:
    training, tensor, samples = row.training, row.layout.tensor, row.batch.micro
    model = stage[0].model
    params, kept = sum(load.params for load in stage), sum(load.kept for load in stage)
    blocks = sum(load.piece.blocks for load in stage)
    wide = value_bytes(training.precision) / 2
    held = wide * model.held(samples, tensor, training.recompute)
    in_flight = pieces_in_flight(row, number) / row.layout.chunks
    working = 0.0
    if training.recompute != "none":
        working = wide * model.held(samples, tensor, "none")
    logits = LOGIT_BYTES * samples * model.sequence * model.vocabulary / tensor
    working = max(working, logits * sum(load.piece.head for load in stage))
    embedded = 2 * wide * samples * model.sequence * model.hidden * stage[0].piece.embedding
    copies = 4 * kept if gradient_bytes(row) < 4 and training.schedule != "message-driven" else 0.0
    return RunMemory(
        state=_state(row, params, kept),
        activations=in_flight * (blocks * held + embedded),
        working=working,
        update=copies / (row.layout.data if training.zero else 1),
    )


def _state(row: RunRow, params: float, kept: float) -> float:
    """Bytes of weights, gradients, masters and moments."""
    training, replicas = row.training, row.layout.data
    weight = value_bytes(training.precision)
    gradient = gradient_bytes(row)
    optimizer = MASTER_AND_MOMENTS if weight == 2 else MASTER_AND_MOMENTS - 4
    weights = weight * params / (replicas if training.zero == 3 else 1)
    gradients = gradient * kept / (replicas if training.zero >= 2 else 1)
    positions = INDEX_BYTES * kept if training.sparsity else 0.0
    return weights + gradients + positions + optimizer * kept / (replicas if training.zero else 1)


def pieces_in_flight(row: RunRow, stage: int) -> int:
    """Of how many pieces and microbatches a stage holds the activations at most.

    Without chunks these are microbatches. Interleaved, the warm-up's forwards and one more
    (`interleaved`).
    """
    layout, microbatches = row.layout, row.microbatches
    if layout.chunks == 1 or layout.pipeline == 1:
        held = most_in_flight(
            schedule_of(row), stage=stage, g_inter=layout.pipeline, microbatches=microbatches
        )
        return held * layout.chunks
    first = warm_up(stage, layout.pipeline, layout.chunks, microbatches)
    return min(microbatches * layout.chunks, first + 1)
