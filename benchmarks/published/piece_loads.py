"""Which blocks stand on which stage, what each computes and holds, and which ranks share a node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from axsparse.pipeline.partition import partition
from axsparse.planner.step_cost import Group, group
from published.run_file import RunRow
from published.transformer import Transformer, Work


def transformer(row: RunRow) -> Transformer:
    """The model of a run."""
    sizes, asked = row.model, row.training.attention
    head_dim = sizes.head_dim or sizes.hidden_size // sizes.num_heads
    is_llama = sizes.family == "llama"
    is_fused = asked == "fused" or (asked is None and is_llama)
    by_sequence = row.training.sequence_parallel
    if by_sequence is None:
        # Selective recomputation and sequence parallelism came with one version of Megatron-LM.
        by_sequence = is_fused or row.training.recompute == "selective"
    ffn = sizes.intermediate_size
    if ffn is None:
        ffn = -(-8 * sizes.hidden_size // (3 * 256)) * 256 if is_llama else 4 * sizes.hidden_size
    return Transformer(
        family=sizes.family,
        layers=sizes.num_layers,
        hidden=sizes.hidden_size,
        heads=sizes.num_heads,
        kv_heads=sizes.num_kv_heads or sizes.num_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocabulary=sizes.vocab_size,
        sequence=sizes.sequence_length,
        tied=not is_llama if sizes.tie_embeddings is None else sizes.tie_embeddings,
        fused_attention=is_fused,
        sequence_parallel=by_sequence,
    )


@dataclass(frozen=True)
class Piece:
    """A run of neighbouring blocks, with the embedding before it or the head behind it."""

    blocks: float
    embedding: float = 0.0
    """1 for the first piece of a model, else 0; a fraction where work is divided exactly."""
    head: float = 0.0


def pieces(row: RunRow, model: Transformer) -> list[Piece]:
    """The pipeline × chunks pieces of a run's model, in the order of the model."""
    layout = row.layout
    number = layout.pipeline * layout.chunks
    if layout.split == "fractions":
        return [Piece(model.layers / number, 1 / number, 1 / number)] * number
    if layout.split == "balanced":
        return _balanced(row, model, number)
    sizes = layout.split if isinstance(layout.split, tuple) else even_blocks(model.layers, number)
    last = number - 1
    return [Piece(n, float(at == 0), float(at == last)) for at, n in enumerate(sizes)]


def even_blocks(layers: int, number: int) -> list[int]:
    """Equal numbers of blocks; where they do not divide, pieces near the ends have one fewer.

    The embedding and the head are there, so that runs give them fewer (Qi et al., 2024).
    """
    sizes = [layers // number] * number
    first = (number - layers % number + 1) // 2
    for at in range(first, first + layers % number):
        sizes[at] += 1
    return sizes


def _balanced(row: RunRow, model: Transformer, number: int) -> list[Piece]:
    """Cut where the piece with most work has as little as can be, by flops."""
    again = 4 if row.training.recompute == "full" else 3
    costs = [0.0, *[again * model.block_flops] * model.layers, 3 * model.head_flops]
    found = partition(costs, number)
    assert found is not None, "there is no limit"
    last = len(costs) - 1
    return [
        Piece(sum(0 < layer < last for layer in held), float(0 in held), float(last in held))
        for held in found
    ]


@dataclass(frozen=True)
class PieceLoad:
    """The compute of one piece for a microbatch, on one of the devices that share it."""

    model: Transformer
    piece: Piece
    row: RunRow

    @cached_property
    def forward(self) -> Work:
        samples, tensor = self.row.batch.micro, self.row.layout.tensor
        return (
            self.model.block(samples, tensor)
            .times(self.piece.blocks)
            .plus(self.model.embedding(samples).times(self.piece.embedding))
            .plus(self.model.head(samples, tensor).times(self.piece.head))
        )

    @cached_property
    def again(self) -> Work:
        """The compute that the backward repeats."""
        samples, tensor = self.row.batch.micro, self.row.layout.tensor
        recompute = self.row.training.recompute
        if recompute == "none" or (recompute == "selective" and self.model.fused_attention):
            return Work()
        part = self.model.block if recompute == "full" else self.model.attention
        return part(samples, tensor).times(self.piece.blocks)

    @property
    def reduces(self) -> tuple[float, float]:
        """All-reduces of b s h activations over the tensor group, in forward and backward.

        A block has two in each, and two more where it is recomputed; the embedding has one in the
        forward and the head one in the backward (Shoeybi et al., 2019, section 3).
        """
        if self.row.layout.tensor == 1:
            return 0.0, 0.0
        recomputed = 2 if self.row.training.recompute == "full" else 0
        forward = 2 * self.piece.blocks + self.piece.embedding
        return forward, (2 + recomputed) * self.piece.blocks + self.piece.head

    @cached_property
    def params(self) -> float:
        """Entries of the weights on a device; of a tied weight both uses count where they are
        apart."""
        found = self.piece.blocks * self.model.block_params + self.words
        return found / self.row.layout.tensor + self.piece.embedding * self.model.position_params

    @property
    def words(self) -> float:
        """Entries of word embedding and head, over all devices of the tensor group."""
        uses = self.piece.embedding + self.piece.head
        layout = self.row.layout
        if self.model.tied and (layout.pipeline == 1 or layout.split == "fractions"):
            uses /= 2
        return uses * self.model.word_params

    @property
    def density(self) -> float:
        return 1 - self.row.training.sparsity

    @property
    def kept(self) -> float:
        """Entries of the weights on a device that are not pruned."""
        pruned = self.piece.blocks * self.model.block_params * self.row.training.sparsity
        return self.params - pruned / self.row.layout.tensor


def stage_pieces(loads: Sequence[PieceLoad], stages: int) -> list[list[PieceLoad]]:
    """The pieces of each stage: piece c of stage s is number c p + s."""
    return [list(loads[stage::stages]) for stage in range(stages)]


@dataclass(frozen=True)
class NodePlacement:
    """Ranks are numbered by tensor, then by data or pipeline, and fill one node after the other."""

    data: int
    tensor: int
    pipeline: int
    gpus_per_node: int
    pipeline_first: bool
    """Whether neighbouring stages are nearer than replicas, as in axsparse; in Megatron-LM the
    replicas are."""

    @property
    def tensor_group(self) -> Group:
        """The devices that share the layers of a stage."""
        return group(self.tensor, 1, self.gpus_per_node)

    @property
    def data_group(self) -> Group:
        """The replicas of a stage."""
        return group(self.data, self._replica_stride, self.gpus_per_node)

    @property
    def ends(self) -> Group:
        """The first and the last stage of a replica, which sum a tied weight's gradients."""
        apart = (self.pipeline - 1) * self._stage_stride
        first_stages = self.data_group.on_node * self.tensor
        ranks = self.tensor * self.pipeline * self.data
        same = apart < self.gpus_per_node and ranks <= self.gpus_per_node
        return Group(2, 2 if same else 1, min(self.gpus_per_node, first_stages))

    @property
    def senders(self) -> int:
        """How many ranks of a node send to the next stage on another node at the same time."""
        return min(self.gpus_per_node, self._stage_stride)

    @property
    def _replica_stride(self) -> int:
        return self.tensor * (self.pipeline if self.pipeline_first else 1)

    @property
    def _stage_stride(self) -> int:
        return self.tensor * (1 if self.pipeline_first else self.data)

    def kinds(self) -> dict[tuple[bool, ...], int]:
        """Which edges of a replica's pipeline leave a node, with one replica of each kind.

        The last entry is the edge from the last stage back to the first.
        """
        found: dict[tuple[bool, ...], int] = {}
        for replica in range(min(self.data, self.gpus_per_node)):
            nodes = [
                (replica * self._replica_stride + stage * self._stage_stride) // self.gpus_per_node
                for stage in range(self.pipeline)
            ]
            following = [*nodes[1:], nodes[0]]
            crosses = tuple(one != two for one, two in zip(nodes, following, strict=True))
            found.setdefault(crosses, replica)
        return found
