"""The manifest of a ticket: who drew the masks, from which model, and how sparse they are.

The manifest is JSON in the metadata of the ticket's safetensors file, beside its hash:
{"ticket": manifest, "ticket_hash": BLAKE2b-128 of the manifest in hex}. When it is read, values
that follow from others are computed again and compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from axsparse.runtime.errors import DataError
from axsparse.runtime.version import __version__

FORMAT = 1
"""The version of the file format; files of another version are refused."""
TICKET_FILE = "ticket.safetensors"
"""The file in the run directory with the masks that the pruning method has found, as a ticket."""
MANIFEST_KEY, HASH_KEY = "ticket", "ticket_hash"


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("has letters that cannot be shown")
    return text


Count = Annotated[int, Field(ge=0, lt=2**63)]
Text = Annotated[str, AfterValidator(_printable)]
"""Text that may be shown in a message of one line."""
Shape = Annotated[tuple[Count, ...], Field(max_length=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Entry(_Strict):
    """One pruned tensor."""

    shape: Shape
    kept: Count
    sparsity: float
    """Fraction of the entries that is removed."""
    hash: Text
    """Hash of the packed bits."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class TicketManifest(_Strict):
    """Everything that a ticket contains beside the bits of its masks."""

    version: int
    algorithm: Text
    """`pruning.method` of the run that drew the masks."""
    step: Count
    """Steps that the run had done by then."""
    seed: int
    """The seed of that run."""
    axsparse: Text
    """The version of the package that wrote the ticket."""
    sparsity: float
    """Fraction of all entries of the pruned tensors that is removed."""
    hash: Text
    """Hash of the masks; equal if names, shapes and bits are equal, and only then."""
    tensors: dict[Text, Entry]
    """The pruned tensors by global name, in model order; a tied weight once, by its first use."""
    model_hash: Text
    """Hash of `parameters`."""
    parameters: dict[Text, Shape]
    """The shapes of all parameters of the model by global name, in model order."""

    @property
    def kept(self) -> int:
        """Kept entries of all pruned tensors."""
        return sum(entry.kept for entry in self.tensors.values())

    @property
    def numel(self) -> int:
        """Entries of all pruned tensors."""
        return sum(entry.numel for entry in self.tensors.values())

    def text(self, indent: int | None = None) -> str:
        """The manifest as JSON."""
        return json.dumps(self.model_dump(), indent=indent)

    def metadata(self) -> dict[str, str]:
        """The metadata of the ticket's file."""
        text = self.text()
        return {MANIFEST_KEY: text, HASH_KEY: hash_of(text.encode())}


def make_manifest(
    *,
    algorithm: str,
    step: int,
    seed: int,
    parameters: Mapping[str, Shape],
    tensors: Mapping[str, tuple[Shape, int, str]],
    version: str = __version__,
) -> TicketManifest:
    """The manifest of a ticket, with all computed values.

    `tensors` has the shape, the number of kept entries and the hash of each pruned tensor by
    global name. Both mappings are in model order.
    """
    entries = {
        name: Entry(shape=shape, kept=kept, sparsity=_sparsity(kept, math.prod(shape)), hash=bits)
        for name, (shape, kept, bits) in tensors.items()
    }
    kept = sum(entry.kept for entry in entries.values())
    numel = sum(entry.numel for entry in entries.values())
    return TicketManifest(
        version=FORMAT,
        algorithm=algorithm,
        step=step,
        seed=seed,
        axsparse=version,
        sparsity=_sparsity(kept, numel),
        hash=_hash_of_json([[name, entry.shape, entry.hash] for name, entry in entries.items()]),
        tensors=entries,
        model_hash=_hash_of_json(list(parameters.items())),
        parameters=dict(parameters),
    )


def read_manifest(path: Path, metadata: Mapping[str, Any]) -> TicketManifest:
    """The manifest in a file's metadata; DataError if it is missing, damaged or inconsistent."""
    text = metadata.get(MANIFEST_KEY)
    if not isinstance(text, str):
        raise DataError(
            f"{path}: no ticket, since it has no manifest; name a file that pruning wrote"
        )
    try:
        encoded = text.encode()
        version = operator.index(json.loads(text)["version"])
    except (ValueError, KeyError, TypeError, RecursionError) as reason:
        raise DataError(
            f"{path}: its manifest cannot be read ({type(reason).__name__}); get the ticket anew"
        ) from reason
    if version != FORMAT:
        raise DataError(
            f"{path}: a ticket of format {str(version)[:20]}, and this axsparse reads {FORMAT}; "
            "take the version that wrote it, or draw the ticket again"
        )
    if metadata.get(HASH_KEY) != hash_of(encoded):
        raise DataError(f"{path}: its manifest has another hash than it says; get the ticket anew")
    try:
        manifest = TicketManifest.model_validate_json(encoded)
    except ValidationError as reason:
        first = reason.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise DataError(
            f"{path}: its manifest is malformed at {place!r} ({first['type']}); get the ticket anew"
        ) from reason
    _refuse_contradictions(path, manifest)
    return manifest


def _refuse_contradictions(path: Path, manifest: TicketManifest) -> None:
    for name, entry in manifest.tensors.items():
        if manifest.parameters.get(name) != entry.shape:
            raise DataError(
                f"{path}: prunes {name!r} of shape {entry.shape}, which is no parameter of the "
                "model that it names; get the ticket anew"
            )
    computed = make_manifest(
        algorithm=manifest.algorithm,
        step=manifest.step,
        seed=manifest.seed,
        parameters=manifest.parameters,
        tensors={name: (e.shape, e.kept, e.hash) for name, e in manifest.tensors.items()},
        version=manifest.axsparse,
    )
    if computed != manifest:
        odd = [key for key, value in computed if value != getattr(manifest, key)]
        raise DataError(
            f"{path}: its manifest contradicts itself at {odd[0]!r}; get the ticket anew"
        )


def hash_of(data: bytes | memoryview) -> str:
    """The BLAKE2b-128 hash in hex."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _hash_of_json(value: object) -> str:
    return hash_of(json.dumps(value).encode())


def _sparsity(kept: int, numel: int) -> float:
    return 1 - kept / numel if numel else 0.0
