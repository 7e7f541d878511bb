"""Saves training between two steps: all ranks copy, their threads write, rank 0 commits.

Each replica of a stage writes some of its layers: training copies them and continues, while a
thread writes the copies and reads the files back. Once the agreement of a step says that every
rank's thread has ended, rank 0 gathers the entries of the written files and lets the checkpoint
appear, in a thread too. So no more than one checkpoint is under way, and it costs no step a
separate collective.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import xxhash
from torch import Tensor

from axsparse.config.validate import STAGING_BYTES
from axsparse.data_parallel.running_statistics import RunningStatistics
from axsparse.pruning.methods.pruner import MethodState, Pruner, PrunerState
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import AxsparseError, MissingInputError, OutputError, writing
from axsparse.runtime.exchange import gather_values, together
from axsparse.runtime.files.atomic import sync_folder
from axsparse.runtime.files.run_folder import ANOTHER_RUN_DIR, RunMark
from axsparse.runtime.files.safetensors import write_safetensors
from axsparse.runtime.process import write_line
from axsparse.runtime.provenance import checkout_commit, versions
from axsparse.samo.layer_construction import BuiltLayer
from axsparse.training.checkpoint import checkpoint_folder as folders
from axsparse.training.checkpoint.checkpoint_folder import (
    FORMAT,
    CheckpointManifest,
    DataEntry,
    FileEntry,
    LayerEntry,
    manifest_bytes,
)
from axsparse.training.checkpoint.layer_files import LayerContents, TensorCopy, contents_of, deal
from axsparse.training.checkpoint.verification import is_complete, read_entry
from axsparse.training.plan import RunPlan
from axsparse.training.progress import Progress
from axsparse.training.run_directory import RunDir, delete_healed

THREAD = "axsparse checkpoint"
T = TypeVar("T")


@dataclass
class _PendingCheckpoint:
    progress: Progress
    method_state: MethodState
    folder: Path
    """The unfinished folder, which gets the checkpoint's name in the end."""
    layers: dict[str, LayerEntry]
    queue: CopyQueue
    """The copies that are on their way to the thread that writes."""
    writing: Future[dict[str, FileEntry]]
    before: int | None
    """The step of the newest checkpoint before it; None if there is none."""
    committing: Future[None] | None = None
    """The commit, which rank 0 begins once all ranks have written; None until then."""
    is_written: bool = False

    @property
    def work(self) -> list[Future[Any]]:
        """The work that this rank's threads have begun."""
        return [work for work in (self.writing, self.committing) if work is not None]


@dataclass(eq=False)
class Saver:
    """Saves one rank's part of the state; all ranks call the same methods at the same steps."""

    run_dir: RunDir
    """The directory, whose lock is released when this closes."""
    plan: RunPlan
    data: DataEntry
    layers: Sequence[BuiltLayer]
    pruner: Pruner | None
    statistics: RunningStatistics
    transport: Transport
    note_progress: Callable[[], object]
    """Called, in any thread, for every piece that is written or read back."""

    def __post_init__(self) -> None:
        self.shown = self.run_dir.path / folders.CHECKPOINTS
        """The folder of the checkpoints, as messages name it."""
        self.folder = self.run_dir.folder / folders.CHECKPOINTS
        checkpoint = self.run_dir.checkpoint
        self._first_step = None if checkpoint is None else checkpoint.step
        """The step of the checkpoint that is gone on from, maybe another run's; None without."""
        is_own = checkpoint is not None and (
            checkpoint.path.resolve().parent == self.folder.resolve()
        )
        self.resumed_step = self._first_step if is_own else None
        """The step of the checkpoint of this folder that the run was resumed from; None without."""
        self.last_step = self.resumed_step
        """The step of the newest checkpoint of this folder; None without."""
        self._coords, self._settings = self.plan.coords, self.plan.config.checkpoint
        self._whole = set() if self.last_step is None else {self.last_step}
        self._pending: _PendingCheckpoint | None = None
        self._appeared: list[int] = []
        self._mark = RunMark.of(self.folder.parent) if self._coords.rank == 0 else None
        """For rank 0, which writes manifests."""
        self._background = Background()

    def due(self, step: int, *, is_last: bool) -> bool:
        """Whether the settings ask for a checkpoint after this step."""
        every = self._settings.every
        if not every or step == self.last_step or step == 0:
            return False
        return is_last or (step % every == 0 and step != self._first_step)

    @property
    def is_writing(self) -> bool:
        """Whether a thread of this rank is still writing or committing."""
        pending = self._pending
        return pending is not None and not all(work.done() for work in pending.work)

    def start(self, progress: Progress) -> None:
        """Copy this rank's part of the state, and begin to write it in a thread.

        Waits for the checkpoint before, if that is still under way. OutputError on all ranks if
        either of them cannot be written.
        """
        self.finish()
        pruner = PrunerState(MethodState()) if self.pruner is None else self.pruner.state()
        layers = self._dealt_layers(pruner)
        # Of the tensor-parallel ranks of a stage the first one writes.
        is_first = self._coords.tp_rank == 0
        dealt = [layer for layer, is_own in layers if is_own and is_first]
        step = progress.step

        def make_folder() -> None:
            if self._mark is not None:
                self._mark.check()
                with self._writing(self.folder):
                    folders.begin(self.folder, step)

        together(self.transport, make_folder)
        folder = folders.path_of(self.folder, step).with_suffix(folders.UNFINISHED)
        files = {name: file for layer in dealt for name, file in layer.files.items()}
        queue = CopyQueue(STAGING_BYTES)
        self._pending = _PendingCheckpoint(
            progress.model_copy(deep=True),
            pruner.method_state,
            folder,
            {layer.name: layer.entry for layer in dealt},
            queue,
            self._background.do(lambda: _write(folder, files, queue, self.note_progress)),
            self.last_step,
        )
        self.last_step = step
        with self.statistics.of_first_replica(evaluates=False):
            # What ranks gather together all of them ask for, in the same order.
            for layer, is_own in layers:
                for tensor in (tensor for file in layer.files.values() for tensor in file.values()):
                    writes = is_own and is_first and not tensor.is_fixed
                    if writes or tensor.is_gathered or (is_own and tensor.is_shard):
                        value = tensor.value()
                        if is_own and is_first:
                            queue.put(value.clone())
        queue.all_put()

    def advance(self, *, any_writing: bool) -> None:
        """Take the next step of a checkpoint that is under way, if no rank is at work on it.

        `any_writing` is what the last agreement said of that. OutputError on all ranks if the
        checkpoint failed.
        """
        pending = self._pending
        if pending is None or any_writing:
            return
        try:
            if not pending.is_written:
                self._collect(pending)
                return
            commit = pending.committing
            together(self.transport, lambda: commit and self._result(commit, self.folder))
        except AxsparseError:
            self._pending, self.last_step = None, pending.before
            raise
        self._pending = None
        self._appeared.append(pending.progress.step)

    def take_complete(self) -> list[int]:
        """The steps whose checkpoints are complete since the last call, alike on all ranks."""
        taken, self._appeared = self._appeared, []
        return taken

    def finish(self) -> None:
        """Wait until no checkpoint is under way; raises the errors of `advance`."""
        while (pending := self._pending) is not None:
            wait(pending.work)
            self.advance(any_writing=False)

    def close(self) -> None:
        """Give up the checkpoint that is under way, and release the lock of the run directory.

        A commit that has begun is completed; files of an unfinished checkpoint stay until the
        next one is begun.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.queue.close()
            wait(pending.work)
        self._background.close()
        if self.run_dir.lock is not None:
            self.run_dir.lock.release()

    def _dealt_layers(self, pruner: PrunerState) -> list[tuple[LayerContents, bool]]:
        """The layers of this stage in order, and whether this replica is the one to write each."""
        plan, coords = self.plan, self._coords
        contents = [
            contents_of(number, layer, plan.profile.ties, pruner, plan.model.start)
            for number, layer in zip(plan.stages[coords.stage], self.layers, strict=True)
        ]
        writers = deal([layer.nbytes for layer in contents], coords.grid.g_data)
        return [
            (layer, writer == coords.replica)
            for layer, writer in zip(contents, writers, strict=True)
        ]

    # -- what all ranks do together -----------------------------------------------------

    def _collect(self, pending: _PendingCheckpoint) -> None:
        """Gather the entries of all ranks' files, and let rank 0 begin to commit it."""
        try:
            files = together(self.transport, lambda: self._result(pending.writing, pending.folder))
        except AxsparseError:
            if self.transport.rank == 0:
                with suppress(OSError):
                    folders.delete(pending.folder)
            raise
        entries = {
            "layers": {name: entry.model_dump() for name, entry in pending.layers.items()},
            "files": {name: entry.model_dump() for name, entry in files.items()},
        }
        written = gather_values(self.transport, entries)
        pending.is_written = True
        if self.transport.rank == 0:
            manifest = self._manifest(pending, written)
            pending.committing = self._background.do(lambda: self._commit(pending.folder, manifest))

    def _result(self, work: Future[T], path: Path) -> T:
        """The result of a thread's work at a path; OutputError if it failed."""
        try:
            with self._writing(path):
                return work.result()
        except (OutputError, MissingInputError) as reason:
            if self._mark is not None:
                self._mark.check()  # whether all of the directory is gone
            if isinstance(reason, OutputError):
                raise
            raise OutputError(f"{reason}; it was written a moment ago") from reason

    @contextmanager
    def _writing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as reason:
            advice = f"free space there, or choose {ANOTHER_RUN_DIR}"
            if isinstance(reason, FileNotFoundError):
                advice = f"remove nothing there while a run trains, and choose {ANOTHER_RUN_DIR}"
            if folders.saved_steps(self.folder):
                advice += "; checkpoints before it are still there"
            with writing(f"{self._coords}: checkpoint {path}:", advice):
                raise

    # -- what rank 0 commits ------------------------------------------------------------

    def _manifest(
        self, pending: _PendingCheckpoint, ranks: Sequence[Mapping[str, Any]]
    ) -> CheckpointManifest:
        layers = {name: entry for rank in ranks for name, entry in rank["layers"].items()}
        files = {name: entry for rank in ranks for name, entry in rank["files"].items()}
        position = pending.progress.step * self.plan.config.batch.global_batch_size
        assert self._mark is not None, "rank 0 has it"
        return CheckpointManifest(
            format=FORMAT,
            run=" ".join(self._mark.starts),
            progress=pending.progress,
            method_state=pending.method_state,
            data=self.data.model_copy(update={"position": position}),
            config=self.plan.config.model_dump(mode="json"),
            teacher=self.plan.taught_from,
            versions=dict(versions()),
            git=checkout_commit(),
            layers={
                layer.name: LayerEntry.model_validate(layers[layer.name], strict=False)
                for layer in self.plan.profile.layers
            },
            files={name: FileEntry.model_validate(files[name]) for name in sorted(files)},
            other_names=self.plan.profile.other_names,
        )

    def _commit(self, folder: Path, manifest: CheckpointManifest) -> None:
        """Let the checkpoint appear, and remove outdated ones; runs in a thread."""
        for name, entry in manifest.files.items():
            path = folder / name
            if not path.is_file() or path.stat().st_size != entry.bytes:
                raise OutputError(
                    f"checkpoint {folder}: rank 0 does not see {name} as it was written, so "
                    "another program has removed it, or the hosts do not share the directory; "
                    "leave it to the run, and choose a --run-dir that all hosts share"
                )
        folders.commit(folder, manifest_bytes(manifest))
        if self._mark is not None:
            self._mark.note(saved=True)
        with suppress(OSError):
            delete_healed(self.run_dir.folder)
        self._whole.add(manifest.progress.step)
        for step in folders.outdated(
            self.folder, self._settings, manifest.progress, self._is_complete
        ):
            path = folders.path_of(self.folder, step)
            try:
                if not folders.is_copy(path):
                    folders.remove(path)
            except OSError as reason:  # the new one is whole
                write_line(f"warning: {path}: cannot be removed ({reason.strerror}), and stays")
            self.note_progress()

    def _is_complete(self, step: int) -> bool:
        """Whether a checkpoint is complete; one of an earlier process is read."""
        if step not in self._whole and is_complete(folders.path_of(self.folder, step)):
            self._whole.add(step)
        self.note_progress()
        return step in self._whole


def _write(
    folder: Path,
    files: Mapping[str, Mapping[str, TensorCopy]],
    queue: CopyQueue,
    beat: Callable[[], object],
) -> dict[str, FileEntry]:
    """Write files, and read each of them back, with a `beat` after every piece. Tensors that
    training changes come from the queue."""
    entries = {}
    try:
        for name, tensors in files.items():
            digest = xxhash.xxh3_128()

            def count(piece: bytes | memoryview, digest: xxhash.xxh3_128 = digest) -> None:
                digest.update(piece)
                beat()

            headers = {key: tensor.header for key, tensor in tensors.items()}
            values = (
                tensor.value() if tensor.is_fixed else next(queue) for tensor in tensors.values()
            )
            write_safetensors(folder / name, headers, values, written=count)
            entries[name] = read_entry(folder, name)
            beat()
            if entries[name].xxh3 != digest.hexdigest():
                raise OSError(None, f"{name} reads otherwise than it was written")
        sync_folder(folder)
    finally:
        queue.close()
    return entries


class Background:
    """A thread that does one piece of work after the other, until it is closed.

    It is there from the beginning, since Python starts no thread any more once a program ends. As a
    daemon it does not keep a rank that failed elsewhere waiting for the disk. A daemon that frees a
    tensor while the interpreter ends would abort the process.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=THREAD, daemon=True)
        self._thread.start()

    def do(self, work: Callable[[], T]) -> Future[T]:
        """Begin some work, after that which has begun; its result, or the error that it raised."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as failure:
                # Errors of every class are raised again in the thread that asks for the result.
                future.set_exception(failure)

        self._work.put(run)
        return future

    def close(self) -> None:
        """End the thread after the work that has begun, and wait for it; safe to call twice."""
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # and the tensors that it refers to


class CopyQueue:
    """A queue of tensors between two threads; `put` waits while the queue is full.

    The reader gets nothing before the queue is full or everything has been put: training waits
    while its state is copied, and a thread that writes meanwhile would only slow that down.
    """

    def __init__(self, limit_bytes: float) -> None:
        """An empty queue takes a tensor of any size, so that no `limit_bytes` is too small."""
        self._limit = limit_bytes
        self._tensors: deque[Tensor] = deque()
        self._held = 0
        self._taken = 0
        self._changed = threading.Condition()
        self._is_closed = False
        self._may_read = False

    def put(self, tensor: Tensor) -> None:
        """Add a tensor that nobody will change any more; after `close` it is dropped."""
        with self._changed:
            while self._held and self._held + tensor.nbytes > self._limit and not self._is_closed:
                self.all_put()
                self._changed.wait()
            if not self._is_closed:
                self._tensors.append(tensor)
                self._held += tensor.nbytes
                self._changed.notify_all()

    def all_put(self) -> None:
        """Let the reader begin, since no more fits or no more will come."""
        with self._changed:
            self._may_read = True
            self._changed.notify_all()

    def __next__(self) -> Tensor:
        """The next tensor, once there is one; ConnectionAbortedError if there will be none.

        It counts towards the limit until the next one is asked for.
        """
        with self._changed:
            self._held -= self._taken
            self._taken = 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: (self._tensors and self._may_read) or self._is_closed)
            if not self._tensors:
                raise ConnectionAbortedError("training ended")
            tensor = self._tensors.popleft()
            self._taken = tensor.nbytes
            return tensor

    def close(self) -> None:
        """Drop the tensors in the queue; neither thread waits any more."""
        with self._changed:
            self._is_closed = True
            self._tensors.clear()
            self._held = self._taken
            self._changed.notify_all()
