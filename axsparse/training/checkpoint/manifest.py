"""What a checkpoint says of itself: where training stood, and which file holds what.

`manifest.json` is one JSON object that ends in `,"sha256":"…"}`, the hash of all bytes
before that. It is written last, so that a folder without one is no checkpoint.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from axsparse.pruning.methods.masking import MethodState
from axsparse.runtime.errors import DataError, MissingInputError

MANIFEST_FILE = "manifest.json"
FORMAT: Literal[1] = 1
"""Of checkpoints; another number is refused."""
MAX_BYTES = 256_000_000
"""Of a manifest; some 150 bytes a parameter tensor are usual."""
_TAIL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}\n?\Z')

Count = Annotated[int, Field(ge=0, lt=2**53)]
FileName = Annotated[
    str, Field(pattern=r"\A[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors\z", max_length=200)
]
"""Of a file beside the manifest; nothing else is ever opened."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class FileEntry(_Strict):
    """One file."""

    bytes: Count
    xxh3: Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]
    """XXH3, 128 bits (`xxhsum -H2`)."""


class ParameterEntry(_Strict):
    """One parameter of the model."""

    shape: Annotated[tuple[Count, ...], Field(max_length=64)]
    kept: Count
    """Entries that are in the file; all of them in a tensor that is not pruned."""


class LayerEntry(_Strict):
    """One layer, in a file of its own."""

    file: FileName
    masking: FileName | None
    """What the pruning method needs of this layer."""
    parameters: dict[str, ParameterEntry]
    """By global name; the second use of a tied weight is in the layer of the first."""


class SpikeHistory(_Strict):
    """What the rule for spikes of the loss knows (`axsparse.training.spikes`)."""

    losses: Annotated[tuple[float, ...], Field(max_length=10_000)] = ()
    """Of the last good steps, oldest first."""
    in_a_row: Count = 0
    """Steps skipped since the last good one."""
    base: Count | None = None
    """Step of the checkpoint that a spike goes back to; 0: there is none yet, None: this one."""
    backs: Count = 0
    """How often the run has gone back to there."""


class FirstBad(_Strict):
    """The first of a row of steps that were skipped since their numbers were not finite."""

    step: Count
    """Its number, from 1."""
    what: Annotated[str, Field(pattern=r"\A[^\p{C}]*\z", max_length=1000)]
    """Where what was not finite."""


class Progress(_Strict):
    """Where training stands, between two steps."""

    step: Count
    """Steps done."""
    updates: Count
    """Those of them that updated the weights, since the last rewinding."""
    schedule_start: Count
    """Steps done at the last rewinding, where the learning rate began anew."""
    masks_changed: Count | None
    """Steps done at the last change of masks."""
    evaluated: bool
    """Whether the evaluation after these steps is over, if there is one."""
    masked: bool
    """Whether masks have changed for the coming step, if they do."""
    loss_scale: Annotated[float, Field(gt=0.0)]
    good_steps: Count
    skipped_at_floor: Count
    jumped: Count = 0
    """Batches that were jumped over; step + jumped have been left behind."""
    not_finite: Count = 0
    """Steps skipped since loss or gradient were not finite."""
    spiked: Count = 0
    """Steps skipped for a spike of the loss."""
    first_bad: FirstBad | None = None
    spikes: SpikeHistory = SpikeHistory()


class DataEntry(_Strict):
    """The training data, and how far they are used."""

    name: str
    fingerprint: str
    samples: Count
    position: Count
    """Samples seen or jumped over; follows from steps, jumps and batch size."""


class CheckpointManifest(_Strict):
    """All that a checkpoint is beside its tensors."""

    format: Literal[1]
    progress: Progress
    standing: MethodState
    """Of the pruning method."""
    data: DataEntry
    config: dict[str, Any]
    """The resolved configuration."""
    versions: dict[str, str]
    git: str | None
    layers: dict[str, LayerEntry]
    """In model order."""
    files: dict[FileName, FileEntry]

    @property
    def pruned(self) -> dict[str, int]:
        """Kept entries of the tensors that were compressed, by global name."""
        return {
            name: entry.kept
            for layer in self.layers.values()
            for name, entry in layer.parameters.items()
            if entry.kept < math.prod(entry.shape)
        }

    @property
    def nbytes(self) -> int:
        """Of all files but the manifest."""
        return sum(entry.bytes for entry in self.files.values())


def manifest_bytes(manifest: CheckpointManifest) -> bytes:
    """What `parse_manifest` reads."""
    text = manifest.model_dump_json().encode()
    assert text.endswith(b"}")
    head = text[:-1]
    return head + b',"sha256":"' + hashlib.sha256(head).hexdigest().encode() + b'"}\n'


def parse_manifest(data: bytes) -> CheckpointManifest:
    """ValueError, of one line, for what is no manifest or has changed since it was written."""
    tail = _TAIL.search(data)
    if tail is None:
        raise ValueError("is cut short, or no manifest")
    head = data[: tail.start()]
    if hashlib.sha256(head).hexdigest().encode() != tail[1]:
        raise ValueError("has another hash than it says")
    try:
        manifest = CheckpointManifest.model_validate_json(head + b"}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"{_printable(where)}: {_printable(first['msg'])}") from None
    for layer in manifest.layers.values():
        for name, entry in layer.parameters.items():
            if entry.kept > math.prod(entry.shape):
                raise ValueError(f"{_printable(name)} keeps more entries than it has")
    named = {layer.file for layer in manifest.layers.values()}
    named |= {layer.masking for layer in manifest.layers.values() if layer.masking is not None}
    if named != manifest.files.keys():
        odd = min(named ^ manifest.files.keys())
        raise ValueError(f"{odd} is among its files or those of its layers, but not in both")
    return manifest


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint; MissingInputError if there is none, DataError if it is
    damaged."""
    path = folder / MANIFEST_FILE
    try:
        with open_plain(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as reason:
        raise MissingInputError(
            f"checkpoint {folder}: {MANIFEST_FILE} cannot be read ({reason.strerror}); resume "
            "from another one"
        ) from reason
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"has more than {MAX_BYTES} bytes")
        return parse_manifest(data)
    except ValueError as wrong:
        raise DataError(
            f"checkpoint {folder}: {MANIFEST_FILE} {wrong}; resume from another one"
        ) from wrong


def open_plain(path: Path) -> BinaryIO:
    """A file for reading; OSError for a link, which could lead out of the folder."""
    # Not to wait where somebody put a named pipe.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)[:200]
