"""Predicts the memory of a run's fullest device: model state, activations, the loss, and a verdict.

Activations follow Korthikanti et al. (2022) by the kind of recomputation, for as many microbatches
as the schedule holds. The prediction is for the report of a training's allocator; the verdict adds
the rest: the libraries' share and the allocator's gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axsparse.planner.cluster import Cluster
from axsparse.planner.stage_memory import most_in_flight, value_bytes
from published.interleaved import warm_up
from published.piece_loads import PieceLoad, pieces, stage_pieces, transformer
from published.run_file import RunRow
from published.run_step import gradient_bytes, schedule_of

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


def predict_memory(row: RunRow, cluster: Cluster) -> RunMemory:
    """The memory of the fullest device of a run."""
    model = transformer(row, fused=bool(cluster.fused_attention))
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
