"""What NCCL takes is measured while as many connections are there as a run makes."""

from __future__ import annotations

from collections.abc import Sequence

from support.standin_device import Hardware
from support.standin_transport import StandIn, StandInCommunicator, StandInConnections, StandInEdge

from axsparse.runtime.gpu.nccl_memory import free_beside_nccl
from axsparse.runtime.local.local_world import LocalWorld

MEMORY, EDGE, GROUP = 10_000, 100, 300


class Counting(StandInConnections):
    """Connections that each take some memory until they are closed."""

    def __init__(self, transport: StandIn) -> None:
        super().__init__(transport.device)
        self.free = MEMORY

    def edge(self, name: str, source: int, target: int) -> StandInEdge:
        self.free -= EDGE
        edge = super().edge(name, source, target)
        self._give_back(edge, EDGE)
        return edge

    def communicator(self, name: str, ranks: Sequence[int]) -> StandInCommunicator:
        self.free -= GROUP
        communicator = super().communicator(name, ranks)
        self._give_back(communicator, GROUP)
        return communicator

    def _give_back(self, made: StandInEdge | StandInCommunicator, nbytes: int) -> None:
        """Have closing it free its memory."""
        close = made.close

        def closed() -> None:
            close()
            self.free += nbytes

        made.close = closed  # type: ignore[method-assign]  # as a subclass of each would


def test_an_inner_stage_with_replicas_and_a_tie_has_this_much_left() -> None:
    world: LocalWorld[int] = LocalWorld(2, seed=1)
    hardware = Hardware(world, seed=1)

    def main(rank: int) -> int:
        transport = StandIn(hardware, rank, "nccl")
        connections = Counting(transport)
        free = free_beside_nccl(
            connections, transport.device, (0, 1), transport.backoff, lambda: connections.free
        )
        assert connections.free == MEMORY, "all are closed again"
        transport.close()
        return free

    assert world.run(main) == [MEMORY - 4 * EDGE - 2 * GROUP] * 2
