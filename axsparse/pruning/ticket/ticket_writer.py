"""Writes tickets: the masks of all stages in one file, the same bytes under every layout."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from axsparse.models.survey import Survey
from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.ticket.ticket_reader import (
    TicketManifest,
    TicketOrigin,
    count_kept,
    hash_of,
    make_manifest,
    pack,
    packed_header,
)
from axsparse.runtime.communication import Op, Transport, wait
from axsparse.runtime.errors import OutputError
from axsparse.runtime.exchange import gather_texts, together
from axsparse.runtime.files.atomic import new_path
from axsparse.runtime.files.safetensors import write_safetensors
from axsparse.runtime.grid import Place


def write_ticket(
    path: str | Path,
    origin: TicketOrigin,
    masks: Mapping[str, Callable[[], Tensor]],
    *,
    transport: Transport,
    place: Place,
) -> TicketManifest:
    """Write the masks of all stages to one file; all ranks call this together, between steps.

    `masks` has, by global name, functions that give the flat bool masks of the pruned tensors of
    this rank's stage; each is called twice on replica 0 and never on other replicas. Rank 0
    writes the file, and receives one tensor's bits at a time. The file appears whole or not at
    all, and replaces an earlier one. Returns its manifest on all ranks.

    Raises OutputError on all ranks alike if the file cannot be written.
    """
    path = Path(path).absolute()
    here = masks if place.replica == 0 else {}
    is_first = place.member == 0
    owners, manifest = _collect_manifest(origin, here, transport, is_first=is_first)

    def write() -> None:
        bits = _bits(manifest, here, owners, transport)
        if transport.rank != 0:
            deque(bits, maxlen=0)
            return
        headers = {name: packed_header(entry) for name, entry in manifest.tensors.items()}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_path(path) as unfinished:
                write_safetensors(unfinished, headers, bits, manifest.metadata())
        except OSError as reason:
            deque(bits, maxlen=0)  # takes part in the other ranks' exchanges to the end
            raise OutputError(
                f"ticket {str(path)!r}: cannot be written ({reason.strerror}); choose another "
                "place, or free the disk"
            ) from reason

    together(transport, write)
    return manifest


def _collect_manifest(
    origin: TicketOrigin,
    here: Mapping[str, Callable[[], Tensor]],
    transport: Transport,
    *,
    is_first: bool,
) -> tuple[dict[str, int], TicketManifest]:
    """The rank that sends each tensor, and the manifest, which is written before the bits; of the
    members of a group only the first sends."""
    own = {}
    for name, mask in here.items():
        packed = pack(mask())
        if is_first:
            own[name] = (count_kept(packed), hash_of(packed.numpy().data))
        del packed  # frees it before the next mask is made
    owners: dict[str, int] = {}
    summaries = {}
    texts = gather_texts(transport.world, transport.backoff, json.dumps(own))
    for rank, text in enumerate(texts):
        for name, summary in json.loads(text).items():
            assert name not in owners, f"{name} is on ranks {owners[name]} and {rank}"
            owners[name], summaries[name] = rank, summary
    return owners, make_manifest(origin, summaries)


def _bits(
    manifest: TicketManifest,
    here: Mapping[str, Callable[[], Tensor]],
    owners: Mapping[str, int],
    transport: Transport,
) -> Iterator[Tensor]:
    """The packed masks in model order; on rank 0 only, since the other ranks just send theirs."""
    for name, entry in manifest.tensors.items():
        owner, (size,) = owners[name], packed_header(entry).shape
        packed = pack(here[name]()) if name in here else torch.empty(size, dtype=torch.uint8)
        if owner != 0 and size:
            bounds = [0] * (owner + 1) + [size] * (transport.size - owner)
            wait(transport.world.start(Op.ALL_GATHER, packed, bounds), transport.backoff)
        if transport.rank in (0, owner):
            assert hash_of(packed.numpy().data) == entry.hash, f"{name}: its mask has changed"
        yield packed
        del packed


def save_live(live: LiveMasks, surveyed: Survey, path: Path, algorithm: str, step: int) -> None:
    """Write a ticket of the entries that are kept after `step` steps of the method `algorithm`.

    All ranks call this together. Raises OutputError on all ranks alike.
    """
    origin = TicketOrigin(algorithm, step, live.options.seed, surveyed.shapes)
    masks = {name: partial(state.mask, name) for name, state, _ in live.counted()}
    write_ticket(path, origin, masks, transport=live.transport, place=live.place)
