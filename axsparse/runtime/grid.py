"""The grid of ranks, pipeline stages times tensor-parallel ranks times replicas, and the
coordinates of each rank in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    """`g_inter` pipeline stages times `g_data` replicas of that pipeline; `g_tensor`
    tensor-parallel ranks compute each stage of a replica.

    `rank = (replica * g_inter + stage) * g_tensor + tp_rank`: tensor-parallel ranks, and then
    neighbouring stages, have neighbouring ranks, so that launchers place them on one node.
    """

    g_inter: int
    g_data: int
    g_tensor: int = 1

    @property
    def size(self) -> int:
        return self.g_inter * self.g_data * self.g_tensor

    @property
    def parallelism(self) -> int:
        """The number of ranks that share a copy of the model."""
        return self.g_inter * self.g_tensor

    def coords(self, rank: int) -> RankCoords:
        assert 0 <= rank < self.size, f"rank {rank} outside a grid of {self.size}"
        each, tp_rank = divmod(rank, self.g_tensor)
        replica, stage = divmod(each, self.g_inter)
        return RankCoords(grid=self, rank=rank, stage=stage, replica=replica, tp_rank=tp_rank)

    def rank(self, stage: int, replica: int, tp_rank: int = 0) -> int:
        """The rank of a tensor-parallel rank of a stage of a replica."""
        is_there = 0 <= stage < self.g_inter and 0 <= replica < self.g_data
        assert is_there and 0 <= tp_rank < self.g_tensor, f"outside {self}"
        return (replica * self.g_inter + stage) * self.g_tensor + tp_rank

    def dp_group(self, stage: int, tp_rank: int = 0) -> tuple[int, ...]:
        """The data-parallel group of one tensor-parallel rank of a stage, in replica order."""
        return tuple(self.rank(stage, replica, tp_rank) for replica in range(self.g_data))

    def __str__(self) -> str:
        stages = f"{self.g_inter} stage" + "s" * (self.g_inter > 1)
        replicas = f"{self.g_data} replica" + "s" * (self.g_data > 1)
        members = f" × {self.g_tensor} tensor-parallel ranks" * (self.g_tensor > 1)
        return f"{stages}{members} × {replicas}"


@dataclass(frozen=True)
class RankCoords:
    """One rank's place in its grid."""

    grid: Grid
    rank: int
    stage: int
    replica: int
    tp_rank: int = 0

    def neighbour(self, step: int) -> int:
        """The rank this many stages after this one, or before it."""
        return self.rank + step * self.grid.g_tensor

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.grid.g_inter - 1

    def __str__(self) -> str:
        tp_rank = f", tensor-parallel rank {self.tp_rank}" * (self.grid.g_tensor > 1)
        return f"rank {self.rank} (stage {self.stage}, replica {self.replica}{tp_rank})"
