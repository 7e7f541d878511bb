"""The folder of a run's checkpoints, in which each appears completely or not at all, and manifests.

    step-40/        a checkpoint
    step-60.tmp/    one that is being written, or was when the run was killed
    step-20.old/    one that is being removed, or was, or step-20.old-2 where the name is taken

Renaming is one indivisible step, and is done once the files are on the disk. Checkpoints are
ordered by step, never by time.

`manifest.json` says where training was, and which file holds which layer. It is one JSON object
that ends in `,"sha256":"…"}`, the hash of all bytes before that, and is written last, so that a
folder without it is no checkpoint.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from axsparse.config.schema import CheckpointConfig
from axsparse.pruning.methods.pruner import MethodState
from axsparse.runtime.errors import AxsparseError, DataError, printable, reading
from axsparse.runtime.files.atomic import sync_folder, write_new
from axsparse.runtime.files.run_folder import delete_own, has_mark, own_files
from axsparse.runtime.process import write_line
from axsparse.training.progress import Count, Progress

MANIFEST_FILE = "manifest.json"
FORMAT: Literal[2] = 2
"""The version of the format of checkpoints; any other is refused."""
MAX_BYTES = 256_000_000
"""The largest manifest that is read; a usual one has some 150 bytes for each tensor."""
_TAIL = re.compile(rb',"sha256":"([0-9a-f]{64})"\}\n?\Z')

FileName = Annotated[
    str, Field(pattern=r"\A[A-Za-z0-9_-][A-Za-z0-9_.-]*\.safetensors\z", max_length=200)
]
"""The name of a file next to the manifest; files of other names are never opened."""


class _Strict(BaseModel):
    model_config = ConfigDict(
        strict=True, extra="forbid", frozen=True, allow_inf_nan=False, ser_json_inf_nan="constants"
    )


class FileEntry(_Strict):
    """The size and hash of one file."""

    bytes: Count
    xxh3: Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]
    """The XXH3 hash of 128 bits, as `xxhsum -H2` prints it."""


class ParameterEntry(_Strict):
    """The shape of one parameter of the model, and how much of it is kept."""

    shape: Annotated[tuple[Count, ...], Field(max_length=64)]
    kept: Count
    """Number of entries in the file; all entries if the parameter is not pruned."""


class LayerEntry(_Strict):
    """The files and parameters of one layer."""

    file: FileName
    pruner: FileName | None
    """The file of the pruning method's state of this layer; None if it has none."""
    parameters: dict[str, ParameterEntry]
    """By global name; a tied weight is in the layer of its first use only."""


class DataEntry(_Strict):
    """The training data, and the position in them."""

    name: str
    fingerprint: str
    samples: Count
    position: Count
    """Number of samples used: step · global batch size."""


class CheckpointManifest(_Strict):
    """The contents of a checkpoint, apart from its tensors."""

    format: Literal[2]
    run: str
    """The identifiers of the run's starts until then, by its mark, with blanks between them; the
    last one alone in older checkpoints."""
    progress: Progress
    method_state: MethodState
    data: DataEntry
    config: dict[str, Any]
    teacher: str | None = None
    """The fingerprint of the teacher's weights; None without a teacher."""
    versions: dict[str, str]
    git: str | None
    """The commit of the checkout that wrote it, which may end in "-dirty"; None if unknown."""
    layers: dict[str, LayerEntry]
    """In model order."""
    files: dict[FileName, FileEntry]
    other_names: dict[str, str] = Field(default_factory=dict)
    """Further names of parameters and buffers that have several, each with the one in the files."""

    @property
    def pruned(self) -> dict[str, int]:
        """Number of kept entries of each pruned parameter, by global name."""
        return {
            name: entry.kept
            for layer in self.layers.values()
            for name, entry in layer.parameters.items()
            if entry.kept < math.prod(entry.shape)
        }


def manifest_bytes(manifest: CheckpointManifest) -> bytes:
    """The contents of manifest.json, which `parse_manifest` reads."""
    text = manifest.model_dump_json().encode()
    assert text.endswith(b"}")
    head = text[:-1]
    return head + b',"sha256":"' + hashlib.sha256(head).hexdigest().encode() + b'"}\n'


def parse_manifest(data: bytes) -> CheckpointManifest:
    """Read the contents of manifest.json; ValueError of one line if they are damaged."""
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
        raise ValueError(f"{printable(where)[:200]}: {printable(first['msg'])[:200]}") from None
    named = {layer.file for layer in manifest.layers.values()}
    named |= {layer.pruner for layer in manifest.layers.values() if layer.pruner is not None}
    if named != manifest.files.keys():
        odd = min(named ^ manifest.files.keys())
        raise ValueError(f"{odd} is among its files or those of its layers, but not in both")
    return manifest


def read_manifest(folder: Path) -> CheckpointManifest:
    """The manifest of a checkpoint; MissingInputError without one, DataError if it is damaged."""
    path = folder / MANIFEST_FILE
    where = f"checkpoint {folder}: {MANIFEST_FILE}"
    with reading(where, "take another one"), open_plain(path) as file:
        # Python reserves as many bytes as are asked for.
        data = file.read(min(os.fstat(file.fileno()).st_size, MAX_BYTES) + 1)
    try:
        if len(data) > MAX_BYTES:
            raise ValueError(f"has more than {MAX_BYTES} bytes")
        return parse_manifest(data)
    except ValueError as wrong:
        raise DataError(f"{where} {wrong}; take another one") from wrong


def open_plain(path: Path) -> BinaryIO:
    """Open a file for reading; OSError for a link, which could lead out of the folder."""
    # O_NONBLOCK: opening a named pipe would wait for a writer.
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


CHECKPOINTS = "checkpoints"
UNFINISHED, REMOVED = ".tmp", ".old"
"""Suffixes of the name of a checkpoint that is being written, or being removed."""
_STEP = re.compile(r"step-(0|[1-9][0-9]{0,15})")
_OWN_FILE = re.compile(rf"[0-9]{{4,}}-.*\.safetensors|{re.escape(MANIFEST_FILE)}")
_REMAINS = re.compile(rf"{_STEP.pattern}({re.escape(UNFINISHED)}|{re.escape(REMOVED)}(-[0-9]+)?)")


def run_of(path: Path) -> Path:
    """The run whose folder of checkpoints a path is; the path itself if it is none."""
    return path.parent if path.name == CHECKPOINTS and has_mark(path.parent) else path


def path_of(folder: Path, step: int) -> Path:
    """The path of the checkpoint of a step."""
    return folder / f"step-{step}"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint's name; None for other names."""
    match = _STEP.fullmatch(path.name)
    return None if match is None else int(match[1])


def saved_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint, complete or damaged, newest first."""
    steps = ((step_of(path), path) for path in _folders(folder))
    found = (step for step, path in steps if step is not None and _may_be_checkpoint(path))
    return sorted(found, reverse=True)


def away(folder: Path) -> list[Path]:
    """The links by names of checkpoints whose targets are not there, as on a disk that is away."""
    links = (path for path in folder.glob("*") if path.is_symlink() and not path.exists())
    return sorted(path for path in links if step_of(path) is not None)


def foreign(folder: Path, newest: int) -> list[Path]:
    """Folders and files that no run has written, by names of checkpoints after the `newest`."""
    steps = {path: step_of(path) for path in folder.glob("*") if path.exists()}
    named = (path for path, step in steps.items() if step is not None and step > newest)
    return sorted(path for path in named if not (path.is_dir() and _may_be_checkpoint(path)))


def _may_be_checkpoint(path: Path) -> bool:
    """Whether a folder has the file of a layer, or no other files than a checkpoint's."""
    try:
        own = own_files(path, _OWN_FILE)
        return len(own) == len([*path.iterdir()]) or any(one.name != MANIFEST_FILE for one in own)
    except OSError:  # nobody knows
        return True


def unfinished(folder: Path) -> list[Path]:
    """The checkpoints that killed runs left half written or half removed. What is removed has lost
    its manifest first, and what is written gets it last and is the newest: another folder with such
    a name that has one is a user's copy."""
    found, newest = [], next(iter(saved_steps(folder)), -1)
    for path in _folders(folder):
        named = _REMAINS.fullmatch(path.name)
        is_new = named and path.suffix == UNFINISHED and int(named[1]) > newest
        # A run that is still at work may finish or remove it meanwhile.
        with suppress(FileNotFoundError):
            is_copied = named and not is_new and (path / MANIFEST_FILE).exists()
            if named and not is_copied and (own_files(path, _OWN_FILE) or not any(path.iterdir())):
                found.append(path)
    return sorted(found)


def is_copy(path: Path) -> bool:
    """Whether a folder has the manifest of another step than its name: a user's copy."""
    try:
        return read_manifest(path).progress.step != step_of(path)
    except AxsparseError:
        return False


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder, and those that links in it point to; none if it does not exist."""
    try:
        return [path for path in folder.iterdir() if path.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def begin(folder: Path, step: int) -> Path:
    """Make an empty folder to write the checkpoint of a step in, and return it.

    What killed runs left unfinished is removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in unfinished(folder):
        delete(path)
    partial = path_of(folder, step).with_suffix(UNFINISHED)
    if (partial / MANIFEST_FILE).exists():
        _set_aside(partial)
    partial.mkdir(exist_ok=True)  # there may be files that no run has written
    return partial


def commit(partial: Path, manifest: bytes) -> Path:
    """Give a checkpoint whose files are on the disk its manifest and its name.

    It replaces a checkpoint of the same step, which is removed once this one has its name; where a
    run is killed between the two, `finish_replacing` gives it the name.
    """
    write_new(partial / MANIFEST_FILE, manifest)
    sync_folder(partial)
    final = partial.with_name(partial.name.removesuffix(UNFINISHED))
    gone = _set_aside(final) if os.path.lexists(final) else None
    partial.rename(final)
    sync_folder(final.parent)
    if gone is not None:
        if gone.is_dir() and not gone.is_symlink():
            (gone / MANIFEST_FILE).unlink(missing_ok=True)
        _delete_aside(gone, final)
    return final


def replacing(folder: Path) -> list[Path]:
    """The complete checkpoints that a killed run left without their names, after it had set the
    checkpoints aside that they replace."""
    return [
        path
        for path in sorted(_folders(folder))
        if _REMAINS.fullmatch(path.name)
        and path.suffix == UNFINISHED
        and (path / MANIFEST_FILE).is_file()
        and not os.path.lexists(path.with_suffix(""))
        and any(
            each.name.startswith(f"{path.stem}{REMOVED}") and _REMAINS.fullmatch(each.name)
            for each in _folders(folder)
        )
    ]


def finish_replacing(folder: Path) -> None:
    """Give the checkpoints of `replacing` their names; the replaced ones stay aside, since a user's
    copy may have such a name as well."""
    for path in replacing(folder):
        path.rename(path.with_suffix(""))
        sync_folder(folder)


def remove(path: Path) -> None:
    """Remove a checkpoint: its manifest and its name disappear before its other files, so that no
    part of it is ever taken for a checkpoint."""
    if not path.is_symlink():
        (path / MANIFEST_FILE).unlink(missing_ok=True)
    gone = _set_aside(path)
    sync_folder(path.parent)
    _delete_aside(gone, path)


def _set_aside(path: Path) -> Path:
    """Rename a checkpoint to a free name of one that is being removed, and return that."""
    gone, number = path.with_name(path.name + REMOVED), 2
    while os.path.lexists(gone):  # files that no run has written stay under such a name
        gone, number = path.with_name(f"{path.name}{REMOVED}-{number}"), number + 1
    path.rename(gone)
    return gone


def _delete_aside(gone: Path, path: Path) -> None:
    """Delete a checkpoint that was set aside from `path`, with a warning if files stay."""
    delete(gone)
    if os.path.lexists(gone):
        files = "files that no run has written, or that cannot be deleted"
        write_line(f"warning: {gone}: was {path.name}, and has {files}")


def delete(path: Path) -> None:
    """Delete a checkpoint, or a link to one, but neither the link's target nor files that no run
    has written, whose folder stays."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        delete_own(path, _OWN_FILE)


def outdated(
    folder: Path, settings: CheckpointConfig, progress: Progress, is_complete: Callable[[int], bool]
) -> list[int]:
    """The steps whose checkpoints are to be removed; `progress` is the newest checkpoint's.

    Kept are the `keep_last` newest complete ones, everything newer than those, the multiples of
    `keep_every`, the best one, and the newest whose weights a later step has trained on, since
    weights that none has trained on may be ruined already. A damaged checkpoint does not count as
    one of the newest.
    """
    steps, complete = saved_steps(folder), 0
    trained_on = (step for step in steps if step < progress.last_good and is_complete(step))
    kept = {next(trained_on, None)}
    if progress.best is not None:
        kept.add(progress.best.step)
    gone = []
    for step in steps:
        if complete < settings.keep_last:
            complete += is_complete(step)
        elif step not in kept and not (settings.keep_every and step % settings.keep_every == 0):
            gone.append(step)
    return gone
