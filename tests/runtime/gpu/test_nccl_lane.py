"""In which order ranks connect their edges: no rank waits for a chain of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from support.standin_device import Hardware
from support.standin_transport import StandIn

from axsparse.runtime.gpu.device_protocol import Communicator, DeviceEdge
from axsparse.runtime.gpu.nccl_lane import connect_edges
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_world import LocalWorld


class Asked:
    """Notes which edges are asked for."""

    def __init__(self) -> None:
        self.edges: list[tuple[int, int]] = []

    def edge(self, name: str, source: int, target: int) -> DeviceEdge:
        self.edges.append((source, target))
        return None  # type: ignore[return-value]  # nobody uses it

    def communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        raise AssertionError("links make edges only")


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 16])
def test_start_up_takes_no_longer_the_more_stages_there_are(stages: int) -> None:
    grid = Grid(stages, 2)
    left: dict[int, list[tuple[int, int]]] = {}
    for rank in range(grid.size):
        asked = Asked()
        assert list(connect_edges(asked, grid.place(rank), "link")) == asked.edges
        left[rank] = asked.edges

    assert _rounds(left) <= 4


@pytest.mark.parametrize("stages", [2, 3, 4, 7])
def test_all_ranks_leave_their_edges_in_one_order(stages: int) -> None:
    """NCCL may hold up whoever closes its end of an edge until the other one does."""
    world: LocalWorld[None] = LocalWorld(stages, seed=1)
    hardware = Hardware(world, seed=1)

    def main(rank: int) -> None:
        transport = StandIn(hardware, rank, "nccl")
        transport.link(Grid(stages, 1).place(rank))
        transport.close()

    world.run(main)

    closed: dict[int, list[tuple[int, int]]] = {
        rank: hardware.shared["closed", rank]  # type: ignore[misc]  # what the stand-in noted
        for rank in range(stages)
    }
    assert sum(map(len, closed.values())) == 4 * (stages - 1)
    assert _rounds(closed) <= 4


def _rounds(left: dict[int, list[tuple[int, int]]]) -> int:
    """In how many rounds ranks come through their edges, each a meeting of its two ends."""
    rounds = 0
    while any(left.values()):
        wanted = Counter(edges[0] for edges in left.values() if edges)
        met = {edge for edge, ends in wanted.items() if ends == 2}
        assert met, "ranks wait for each other in a circle"
        left = {
            rank: edges[1:] if edges and edges[0] in met else edges for rank, edges in left.items()
        }
        rounds += 1
    return rounds
