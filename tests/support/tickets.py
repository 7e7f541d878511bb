"""Small tickets, whole ones and such as nobody should take."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from axsparse.pruning.ticket.ticket_reader import TicketOrigin, hash_of
from axsparse.pruning.ticket.ticket_writer import write_ticket
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld

PARAMETERS = {
    "embed.weight": (7, 4),
    "block0.fc.weight": (5, 4),
    "block0.fc.bias": (5,),
    "block1.fc.weight": (4, 4),
    "block2.conv.weight": (2, 1, 3, 3),
    "head.weight": (7, 4),
}
"""Of a model whose pruned tensors have 20, 16 and 18 entries."""
PRUNED = {name: shape for name, shape in PARAMETERS.items() if name.startswith("block")}
del PRUNED["block0.fc.bias"]
DRAWN = TicketOrigin("early-bird", step=640, seed=7, parameters=PARAMETERS)


def some_masks(shapes: Mapping[str, tuple[int, ...]] = PRUNED) -> dict[str, Tensor]:
    """Flat masks of about a third, the same at each call."""
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.rand(torch.Size(shape).numel(), generator=generator) < 0.3
        for name, shape in shapes.items()
    }


def given(mask: Tensor) -> Tensor:
    return mask


def write_masks(path: Path, masks: Mapping[str, Tensor], drawn: TicketOrigin = DRAWN) -> Path:
    """A ticket, written by one rank."""
    transport = LocalTransport(LocalWorld(1), 0)
    own = {name: partial(given, mask) for name, mask in masks.items()}
    write_ticket(path, drawn, own, transport=transport, place=Grid(1, 1).place(0))
    return path


def small_ticket(folder: Path) -> Path:
    return write_masks(folder / "ticket.safetensors", some_masks())


def forge(path: Path, change: Callable[[dict[str, Any], dict[str, Any], bytearray], None]) -> Path:
    """Change manifest, header and data of a ticket, with a hash of the manifest that is right."""
    contents = path.read_bytes()
    data_start = 8 + int.from_bytes(contents[:8], "little")
    header = json.loads(contents[8:data_start])
    data = bytearray(contents[data_start:])
    manifest = json.loads(header["__metadata__"]["ticket"])
    change(manifest, header, data)
    text = json.dumps(manifest)
    header["__metadata__"] |= {"ticket": text, "ticket_hash": hash_of(text.encode())}
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)
    return path
