"""In which order ranks connect to their peers: no rank waits for a chain of others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from support.standin_device import Hardware
from support.standin_transport import StandIn

from axsparse.runtime.gpu.device_protocol import Communicator, PeerConnection
from axsparse.runtime.gpu.transfers import connect_peers
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_world import LocalWorld


class Asked:
    """Notes which connections are asked for."""

    def __init__(self) -> None:
        self.peers: list[tuple[int, int]] = []

    def peer(self, name: str, source: int, target: int) -> PeerConnection:
        self.peers.append((source, target))
        return None  # type: ignore[return-value]  # nobody uses it

    def communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        raise AssertionError("links make connections of two only")


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7, 16])
def test_start_up_takes_no_longer_the_more_stages_there_are(stages: int) -> None:
    grid = Grid(stages, 2)
    left: dict[int, list[tuple[int, int]]] = {}
    for rank in range(grid.size):
        asked = Asked()
        assert list(connect_peers(asked, grid.place(rank), "link")) == asked.peers
        left[rank] = asked.peers

    assert _rounds(left) <= 4


@pytest.mark.parametrize("stages", [2, 3, 4, 7])
def test_all_ranks_close_their_connections_in_one_order(stages: int) -> None:
    """NCCL may hold up whoever closes its end of a peer connection until the other one does."""
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
    """In how many rounds ranks come through their peers, each a meeting of its two ends."""
    rounds = 0
    while any(left.values()):
        wanted = Counter(peers[0] for peers in left.values() if peers)
        met = {peer for peer, ends in wanted.items() if ends == 2}
        assert met, "ranks wait for each other in a circle"
        left = {
            rank: peers[1:] if peers and peers[0] in met else peers for rank, peers in left.items()
        }
        rounds += 1
    return rounds
