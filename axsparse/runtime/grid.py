"""The grid of ranks, stages times replicas, and each rank's place in it."""

from __future__ import annotations

from dataclasses import dataclass

from axsparse.runtime.errors import ConfigError


@dataclass(frozen=True)
class Grid:
    """`g_inter` pipeline stages times `g_data` replicas of that pipeline.

    `replica = rank // g_inter` and `stage = rank % g_inter`: neighbouring stages
    have neighbouring ranks, so that launchers place them on one node.
    """

    g_inter: int
    g_data: int

    def __post_init__(self) -> None:
        if self.g_inter < 1 or self.g_data < 1:
            raise ConfigError(
                f"layout: g_inter {self.g_inter} × g_data {self.g_data} is no grid; "
                "both must be at least 1"
            )

    @property
    def size(self) -> int:
        """The number of ranks in the grid."""
        return self.g_inter * self.g_data

    def place(self, rank: int) -> Place:
        """The place of a rank from 0 to size − 1."""
        assert 0 <= rank < self.size, f"rank {rank} outside a grid of {self.size}"
        return Place(grid=self, rank=rank, stage=rank % self.g_inter, replica=rank // self.g_inter)

    def rank(self, stage: int, replica: int) -> int:
        """The rank that holds a stage of a replica."""
        assert 0 <= stage < self.g_inter, f"stage {stage} outside {self.g_inter}"
        assert 0 <= replica < self.g_data, f"replica {replica} outside {self.g_data}"
        return replica * self.g_inter + stage

    def column(self, stage: int) -> tuple[int, ...]:
        """The ranks that hold the same stage, in replica order."""
        return tuple(self.rank(stage, replica) for replica in range(self.g_data))

    def __str__(self) -> str:
        stages = f"{self.g_inter} stage" + "s" * (self.g_inter > 1)
        replicas = f"{self.g_data} replica" + "s" * (self.g_data > 1)
        return f"{stages} × {replicas}"


@dataclass(frozen=True)
class Place:
    """One rank's place in its grid."""

    grid: Grid
    rank: int
    stage: int
    replica: int

    @property
    def is_first(self) -> bool:
        """Whether this rank reads the inputs."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.stage == self.grid.g_inter - 1

    def __str__(self) -> str:
        return f"rank {self.rank} (stage {self.stage}, replica {self.replica})"
