"""What ranks tell each other, and how they end."""

from __future__ import annotations

import pytest

from axsparse.runtime.errors import ConfigError, DataError
from axsparse.runtime.exchange import leave_together, together
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld


def endings(*ends: str) -> list[str]:
    """What each rank ends with: one "leaves", the others work together, of which one "fails"."""

    def fail() -> None:
        raise DataError("no data here")

    def body(rank: int) -> str:
        transport = LocalTransport(world, rank)
        try:
            if ends[rank] == "leaves":
                leave_together(transport)
            else:
                together(transport, fail if ends[rank] == "fails" else lambda: None)
        except (ConfigError, DataError) as error:
            return str(error) if error.on_all_ranks else "fails alone"
        return ""

    world: LocalWorld[str] = LocalWorld(len(ends))
    return world.run(body)


def test_ranks_that_all_leave_part_without_a_word() -> None:
    assert endings("leaves", "leaves", "leaves") == [""] * 3


@pytest.mark.parametrize(
    ("ends", "first"), [(("works", "leaves", "leaves"), 1), (("leaves", "works"), 0)]
)
def test_a_rank_that_leaves_while_others_work_is_named_on_all(
    ends: tuple[str, ...], first: int
) -> None:
    said = (
        f"rank {first}: has left `main`, and other ranks wait for it; call build on every rank of "
        "the job, or on none"
    )

    assert endings(*ends) == [said] * len(ends)


def test_a_failure_of_a_rank_before_it_is_what_all_raise() -> None:
    assert endings("fails", "leaves") == ["no data here"] * 2
