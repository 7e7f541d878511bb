"""Tickets are the same bytes under every layout, and appear whole or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
from support.tickets import DRAWN, PARAMETERS, PRUNED, small_ticket, some_masks
from torch import Tensor

import axsparse
from axsparse.pruning.ticket import ticket_writer as ticket_writing
from axsparse.pruning.ticket.ticket_reader import TicketManifest, open_ticket
from axsparse.pruning.ticket.ticket_writer import write_ticket
from axsparse.runtime.errors import OutputError
from axsparse.runtime.files.safetensors import TensorHeader, write_safetensors
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld

LAYOUTS = [(1, 1), (3, 1), (2, 2), (1, 3)]
Own = Mapping[str, Callable[[], Tensor]]


def write_on(
    g_inter: int, g_data: int, path: Path, noted: Callable[[int, str], None] = lambda *_: None
) -> list[TicketManifest]:
    """The manifests on all ranks of a layout; tensor n is on stage n, or on the last stage."""
    world: LocalWorld[TicketManifest] = LocalWorld(g_inter * g_data)
    grid = Grid(g_inter, g_data)

    def main(rank: int) -> TicketManifest:
        def mask(name: str) -> Tensor:
            noted(rank, name)
            return some_masks()[name]

        place = grid.place(rank)
        own: Own = {
            name: partial(mask, name)
            for number, name in enumerate(PRUNED)
            if min(number, g_inter - 1) == place.stage
        }
        transport = LocalTransport(world, rank)
        return write_ticket(path, DRAWN, own, transport=transport, place=place)

    return world.run(main)


# -- the same everywhere --------------------------------------------------------------------


@pytest.mark.parametrize(("g_inter", "g_data"), LAYOUTS)
def test_the_file_is_the_same_bytes_under_every_layout(
    g_inter: int, g_data: int, tmp_path: Path
) -> None:
    reference = small_ticket(tmp_path).read_bytes()

    manifests = write_on(g_inter, g_data, tmp_path / "new" / "t")

    manifest = manifests[0]
    assert (manifest.algorithm, manifest.step, manifest.seed) == ("early-bird", 640, 7)
    assert manifest.axsparse == axsparse.__version__
    assert manifest.parameters == PARAMETERS
    assert {name: entry.shape for name, entry in manifest.tensors.items()} == PRUNED
    kept = {name: int(mask.sum()) for name, mask in some_masks().items()}
    assert {name: entry.kept for name, entry in manifest.tensors.items()} == kept
    assert (tmp_path / "new" / "t").read_bytes() == reference
    assert manifests == [open_ticket(tmp_path / "new" / "t").manifest] * (g_inter * g_data)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["t"]


def test_only_replica_0_is_asked_for_masks_one_at_a_time(tmp_path: Path) -> None:
    asked: list[tuple[int, str]] = []

    write_on(2, 2, tmp_path / "t", lambda rank, name: asked.append((rank, name)))

    first, second, third = PRUNED
    once = [(0, first), (1, second), (1, third)]
    assert sorted(asked) == sorted(once * 2)


# -- whole or not at all --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t", "file/t"])
def test_a_disk_that_fills_up_ends_all_ranks_and_leaves_what_was_there(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fills_up(
        path: Path,
        described: Mapping[str, TensorHeader],
        tensors: Iterator[Tensor],
        metadata: Mapping[str, str],
    ) -> None:
        write_safetensors(path, {}, iter([]))
        next(tensors)
        raise OSError(28, "No space left on device")

    (tmp_path / "file").touch()
    if name == "t":
        (tmp_path / "t").write_text("older")
        monkeypatch.setattr(ticket_writing, "write_safetensors", fills_up)

    with pytest.raises(
        OutputError,
        match=rf"^ticket '{tmp_path / name}': cannot be written \(.+\); choose another place, or "
        "free the disk$",
    ) as told:
        write_on(3, 1, tmp_path / name)

    assert told.value.on_all_ranks
    assert (tmp_path / "file").read_text() == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted({"file", name.partition("/")[0]})
    assert name != "t" or (tmp_path / "t").read_text() == "older"
