"""Saves training between two steps: all ranks copy, threads write, rank 0 lets it appear.

Each replica of a stage writes some of its layers. A rank's thread writes and reads back
what the rank gives it, while training goes on. Once every rank's next agreement says that
all are through, rank 0 hears what was written and commits, in a thread as well. So there is
never more than one checkpoint under way, and no step has a collective more for it.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from axsparse.config.schema import CheckpointConfig
from axsparse.data_parallel.running_statistics import RunningStatistics
from axsparse.models.survey import Survey
from axsparse.pruning.methods.masking import Masking, MaskingState, MethodState
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import MissingInputError, OutputError
from axsparse.runtime.exchange import gather_texts, together
from axsparse.runtime.files.durable import sync_folder
from axsparse.runtime.files.run_lock import RunLock
from axsparse.runtime.files.safetensors import write_safetensors
from axsparse.runtime.grid import Place
from axsparse.samo.layer_construction import BuiltLayer
from axsparse.training.checkpoint import checkpoint_folder as folders
from axsparse.training.checkpoint.background_work import Background
from axsparse.training.checkpoint.copy_queue import Stream
from axsparse.training.checkpoint.layer_files import LayerContents, TensorCopy, contents_of, deal
from axsparse.training.checkpoint.manifest import (
    FORMAT,
    CheckpointManifest,
    DataEntry,
    FileEntry,
    LayerEntry,
    Progress,
    manifest_bytes,
)
from axsparse.training.checkpoint.verification import is_whole, read_entry

Written = Mapping[str, FileEntry]


@dataclass(frozen=True)
class RunFacts:
    """What does not change while a run lasts; equal on all ranks."""

    data: DataEntry
    """At position 0."""
    samples_per_step: int
    config: Mapping[str, Any]
    versions: Mapping[str, str]
    git: str | None


@dataclass
class _Save:
    """A checkpoint that is not there yet."""

    progress: Progress
    standing: MethodState
    partial: Path
    layers: dict[str, LayerEntry]
    """Those that this rank writes."""
    stream: Stream
    writing: Background[Written]
    committing: Background[None] | None = None
    """On rank 0, once all ranks have written."""
    is_written: bool = False


class Saver:
    """Saves one rank's part; all ranks call the same methods at the same steps."""

    def __init__(
        self,
        folder: Path,
        settings: CheckpointConfig,
        facts: RunFacts,
        *,
        transport: Transport,
        place: Place,
        survey: Survey,
        layers: Sequence[BuiltLayer],
        buffers: RunningStatistics,
        masking: Masking | None,
        lock: RunLock | None = None,
        written: Callable[[], object] = lambda: None,
        resumed_at: int | None = None,
    ) -> None:
        """`lock`: what keeps other jobs out, until this closes. `written` is called, in a thread,
        with every piece that is on its way to the disk or read back. `resumed_at`: the step of
        the checkpoint that the run goes on from."""
        self.folder = folder
        self._settings = settings
        self._facts = facts
        self._transport = transport
        self._place = place
        self._survey = survey
        self._layers = layers
        self._buffers = buffers
        self._masking = masking
        self._lock = lock
        self._wrote = written
        self._last = resumed_at
        self._whole = set() if resumed_at is None else {resumed_at}
        self._under_way: _Save | None = None

    def due(self, step: int, *, is_last: bool) -> bool:
        """Whether a checkpoint belongs after this step."""
        every = self._settings.every
        return bool(every) and step != self._last and step > 0 and (is_last or step % every == 0)

    @property
    def is_writing(self) -> bool:
        """Whether this rank still works on its part."""
        now = self._under_way
        if now is None:
            return False
        return now.writing.is_busy or (now.committing is not None and now.committing.is_busy)

    def start(self, progress: Progress) -> None:
        """Copy this rank's part of the state and begin to write it; waits for the checkpoint
        before, if that is still under way. OutputError on all ranks if one cannot be written."""
        self.finish()
        masking = MaskingState(MethodState()) if self._masking is None else self._masking.state()
        own, others = self._dealt(masking)
        step = progress.step
        partial = folders.path_of(self.folder, step)
        partial = partial.with_name(partial.name + folders.UNFINISHED)
        together(self._transport, lambda: self._begin(step))
        files = {name: file for layer in own for name, file in layer.files.items()}
        stream = Stream(self._settings.buffer * 1e9)
        self._under_way = _Save(
            progress,
            masking.standing,
            partial,
            {layer.name: layer.entry for layer in own},
            stream,
            Background(lambda: _write(partial, files, stream, self._wrote), "axsparse checkpoint"),
        )
        self._last = step
        with self._buffers.of_first_replica():
            for saved, is_own in self._in_order(own, others):
                if is_own:
                    stream.put(saved.value().clone())
                else:
                    saved.value()
        stream.all_put()

    def advance(self, *, any_writing: bool) -> None:
        """Take the next step to a checkpoint that is under way, with what the last agreement
        said: whether any rank was writing then. OutputError on all ranks if it failed."""
        now = self._under_way
        if now is None or any_writing:
            return
        if not now.is_written:
            self._collect(now)
            return
        try:
            together(self._transport, lambda: self._committed(now))
        finally:
            self._under_way = None

    def finish(self) -> None:
        """Wait until nothing is under way; errors as `advance`."""
        while (now := self._under_way) is not None:
            for work in (now.writing, now.committing):
                if work is not None:
                    work.wait()
            self.advance(any_writing=False)

    def close(self) -> None:
        """Give up what is under way, once no thread is at it: what has begun to appear appears,
        what is left of it goes with the next checkpoint."""
        now, self._under_way = self._under_way, None
        if now is not None:
            now.stream.close()
            for work in (now.writing, now.committing):
                if work is not None:
                    work.wait()
        if self._lock is not None:
            self._lock.release()

    # -- who writes what ----------------------------------------------------------------

    def _dealt(self, masking: MaskingState) -> tuple[list[LayerContents], list[LayerContents]]:
        """The layers of this stage that this replica writes, and those that others do."""
        numbers = {layer.name: number for number, layer in enumerate(self._survey.layers)}
        contents = [
            contents_of(numbers[layer.spec.name], layer, self._survey.ties, masking)
            for layer in self._layers
        ]
        dealt = deal([layer.nbytes for layer in contents], self._place.grid.g_data)
        parts: tuple[list[LayerContents], list[LayerContents]] = ([], [])
        for layer, writer in zip(contents, dealt, strict=True):
            parts[writer != self._place.replica].append(layer)
        return parts

    def _in_order(
        self, own: Sequence[LayerContents], others: Sequence[LayerContents]
    ) -> Iterator[tuple[TensorCopy, bool]]:
        """What this rank asks for, in an order that all replicas share: what is its own to write,
        and what it has a share of that others write."""
        mine = {layer.name for layer in own}
        by_name = {layer.name: layer for layer in (*own, *others)}
        for layer in self._layers:
            for file in by_name[layer.spec.name].files.values():
                for saved in file.values():
                    if saved.is_gathered or (layer.spec.name in mine and not saved.is_fixed):
                        yield saved, layer.spec.name in mine

    # -- from all ranks -----------------------------------------------------------------

    def _begin(self, step: int) -> None:
        if self._transport.rank != 0:
            return
        try:
            folders.begin(self.folder, step)
        except OSError as reason:
            raise self._unwritable(self.folder, reason) from reason

    def _collect(self, now: _Save) -> None:
        """Hear from all ranks what they wrote, and let rank 0 commit; every rank has written."""
        try:
            together(self._transport, lambda: self._written(now))
        except OutputError:
            self._under_way = None
            if self._transport.rank == 0:
                shutil.rmtree(now.partial, ignore_errors=True)
            raise
        own = {
            "layers": {name: entry.model_dump() for name, entry in now.layers.items()},
            "files": {name: entry.model_dump() for name, entry in now.writing.result().items()},
        }
        world, backoff = self._transport.world, self._transport.backoff
        said = gather_texts(world, backoff, json.dumps(own))
        now.is_written = True
        if self._transport.rank == 0:
            manifest = self._manifest(now, [json.loads(text) for text in said])
            now.committing = Background(
                lambda: self._commit(now.partial, manifest), "axsparse checkpoint"
            )

    def _written(self, now: _Save) -> None:
        try:
            now.writing.result()
        except OSError as reason:
            raise self._unwritable(now.partial, reason) from reason
        except MissingInputError as reason:
            raise OutputError(f"{reason}; it was written a moment ago") from reason

    def _manifest(self, now: _Save, said: Sequence[Mapping[str, Any]]) -> CheckpointManifest:
        layers = {name: entry for part in said for name, entry in part["layers"].items()}
        files = {name: entry for part in said for name, entry in part["files"].items()}
        data, batches = self._facts.data, now.progress.step + now.progress.jumped
        return CheckpointManifest(
            format=FORMAT,
            progress=now.progress,
            standing=now.standing,
            data=data.model_copy(update={"position": batches * self._facts.samples_per_step}),
            config=dict(self._facts.config),
            versions=dict(self._facts.versions),
            git=self._facts.git,
            layers={
                layer.name: LayerEntry.model_validate(layers[layer.name], strict=False)
                for layer in self._survey.layers
            },
            files={name: FileEntry.model_validate(files[name]) for name in sorted(files)},
        )

    def _commit(self, partial: Path, manifest: CheckpointManifest) -> None:
        """On rank 0, while training goes on."""
        for name, entry in manifest.files.items():
            path = partial / name
            if not path.is_file() or path.stat().st_size != entry.bytes:
                raise OutputError(
                    f"checkpoint {partial}: rank 0 does not see {name} as it was written; choose a "
                    "--run-dir that all hosts share"
                )
        folders.commit(partial, manifest_bytes(manifest))
        self._whole.add(manifest.progress.step)
        settings = self._settings
        for step in folders.outdated(
            self.folder, settings.keep_last, settings.keep_every, self._is_whole
        ):
            if step == manifest.progress.spikes.base:
                continue
            folders.remove(folders.path_of(self.folder, step))
            self._wrote()

    def _is_whole(self, step: int) -> bool:
        """Checkpoints of this run were read back; those of runs before are read once."""
        if step not in self._whole and is_whole(folders.path_of(self.folder, step)):
            self._whole.add(step)
        self._wrote()
        return step in self._whole

    def _committed(self, now: _Save) -> None:
        if now.committing is None:
            return
        try:
            now.committing.result()
        except OSError as reason:
            raise self._unwritable(self.folder, reason) from reason

    def _unwritable(self, path: Path, reason: OSError) -> OutputError:
        return OutputError(
            f"{self._place}: checkpoint {path}: cannot be written ({reason.strerror}); free space "
            "there, or choose another --run-dir; checkpoints before it are still there"
        )


def _write(
    partial: Path,
    files: Mapping[str, Mapping[str, TensorCopy]],
    stream: Stream,
    wrote: Callable[[], object],
) -> Written:
    """Write files, from a stream of those of their tensors that training changes, and read each
    back."""
    written = {}
    try:
        for name, saved in files.items():
            digest = xxhash.xxh3_128()
            described = {key: value.described for key, value in saved.items()}
            tensors = (v.value() if v.is_fixed else next(stream) for v in saved.values())
            counted = functools.partial(_count, digest.update, wrote)
            write_safetensors(partial / name, described, tensors, written=counted)
            written[name] = read_entry(partial, name)
            wrote()
            if written[name].xxh3 != digest.hexdigest():
                raise OSError(None, f"{name} reads otherwise than it was written")
        sync_folder(partial)
    finally:
        stream.close()
    return written


def _count(
    update: Callable[[bytes | memoryview], object],
    wrote: Callable[[], object],
    piece: bytes | memoryview,
) -> None:
    update(piece)
    wrote()
