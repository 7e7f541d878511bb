"""Tickets from and to dense masks: a tensor of zeros and ones for each pruned parameter.

Other tools keep masks so. A mask may have the global name of its parameter or that of
transformers, and end in "_mask" as `torch.nn.utils.prune` lets it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from axsparse.models.start_weights import WeightFile, unchanged
from axsparse.models.survey import Survey
from axsparse.models.zoo.hf_models import family_of
from axsparse.pruning.ticket.ticket_reader import Ticket, TicketManifest, TicketOrigin
from axsparse.pruning.ticket.ticket_writer import write_ticket
from axsparse.runtime.errors import ConfigError, DataError
from axsparse.runtime.files.safetensors import TensorHeader, write_safetensors
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld

IMPORTED = "imported"
"""The algorithm that an imported ticket names."""
ENDING = "_mask"


def import_masks(file: WeightFile, surveyed: Survey, path: Path) -> TicketManifest:
    """Write a ticket of the dense masks in a file, one tensor at a time; returns its manifest.

    DataError for a tensor that is no mask of a matrix of the model, or has other values than 0
    and 1; OutputError if the ticket cannot be written.
    """
    shapes = surveyed.shapes
    there = _places(file, shapes)
    for name in there:
        if len(shapes[name]) < 2:
            raise DataError(
                f"{file.path}: {there[name][0]!r} is a mask of {name}, which is a vector; only "
                "matrices are pruned: leave it out"
            )
    masks = {name: partial(_read, file, name, place) for name, place in there.items()}
    origin = TicketOrigin(IMPORTED, step=0, seed=0, parameters=shapes)
    transport = LocalTransport(LocalWorld(1), 0)
    return write_ticket(path, origin, masks, transport=transport, place=Grid(1, 1).place(0))


def export_masks(ticket: Ticket, path: Path, *, foreign: bool) -> None:
    """Write the masks of a ticket as dense uint8 tensors, one at a time, to a new file.

    Names and shapes are the model's, with `foreign` those of transformers; ConfigError if that
    has no such model. Raises OSError if the file cannot be written.
    """
    family = family_of(ticket.manifest.parameters) if foreign else None
    if foreign and family is None:
        raise ConfigError(
            f"--names: {ticket.path} is of a model that transformers has not; choose axsparse"
        )
    named, turned = (str, unchanged) if family is None else (family.named, family.turned)
    entries = ticket.manifest.tensors

    def tensors() -> Iterator[Tensor]:
        for name, entry in entries.items():
            mask = ticket.mask(name).view(entry.shape).to(torch.uint8)
            yield turned(name, mask).contiguous()

    headers = {
        named(name): TensorHeader(
            torch.uint8,
            tuple(turned(name, torch.empty(entry.shape, device="meta")).shape),
        )
        for name, entry in entries.items()
    }
    write_safetensors(path, headers, tensors())


Turn = Callable[[str, Tensor], Tensor]
"""Gives a tensor of the file the shape that the model has."""


def _places(file: WeightFile, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[str, Turn]]:
    """The name in the file of each parameter's mask, and how it is turned; DataError for a tensor
    that belongs to none."""
    known: dict[str, tuple[str, Turn]] = {}
    family = family_of(shapes)
    for name in shapes:
        known[name] = name, unchanged
        if family is not None:
            known[family.named(name)] = known[family.named(name, prefix="")] = name, family.turned
    places: dict[str, tuple[str, Turn]] = {}
    for key in file.shapes:
        if key.removesuffix(ENDING) not in known:
            raise DataError(
                f"{file.path}: {key!r} is the mask of no parameter of the model; leave it out, or "
                "name the model that it was drawn from"
            )
        name, turn = known[key.removesuffix(ENDING)]
        if name in places:
            raise DataError(
                f"{file.path}: {places[name][0]!r} and {key!r} are both masks of {name}; keep one"
            )
        shape = tuple(turn(name, torch.empty(file.shapes[key], device="meta")).shape)
        if shape != shapes[name]:
            raise DataError(
                f"{file.path}: {key!r} has shape {file.shapes[key]}, {name} of the model has "
                f"{shapes[name]}; name the model that it was drawn from"
            )
        places[name] = key, turn
    if not places:
        raise DataError(f"{file.path}: holds no masks; name another file")
    return places


def _read(file: WeightFile, name: str, place: tuple[str, Turn]) -> Tensor:
    """A flat bool mask; DataError for other values than 0 and 1."""
    key, turn = place
    values = turn(name, file.read(key))
    mask = values == 1
    if not (mask | (values == 0)).all():
        raise DataError(
            f"{file.path}: {key!r} has other values than 0 and 1; write masks, not weights "
            "(pruning.method zeros takes those)"
        )
    return mask.reshape(-1)
