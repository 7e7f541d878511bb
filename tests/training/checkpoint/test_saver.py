"""Saving while training continues: who writes, who waits, and what a failure leaves."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import images
from support.resuming import Ran, note_state, ran, same_state, settings
from support.runs import FEW_MICROBATCHES, around_step, mlp, summed_loss, tiny_config, vector_data
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.order import samples_of_step
from axsparse.models.sequential import from_sequential
from axsparse.models.start_weights import open_weights, start_from
from axsparse.observe.watchdog.watchdog import Activity
from axsparse.runtime.errors import OutputError, TrainingError
from axsparse.runtime.files.safetensors import write_safetensors
from axsparse.training.checkpoint import saver as save
from axsparse.training.checkpoint.checkpoint_folder import (
    FileEntry,
    commit,
    saved_steps,
    unfinished,
)
from axsparse.training.checkpoint.layer_files import CheckpointFiles
from axsparse.training.checkpoint.saver import Background, CopyQueue
from axsparse.training.checkpoint.verification import is_complete, open_checkpoint, read_entry
from axsparse.training.trainer import Trainer

Write = Callable[[Path], object]


def config_of(**checkpoint: Any) -> Config:
    checkpoint = {"every": 2, **checkpoint}
    return tiny_config(train={"steps": 6}, batch=FEW_MICROBATCHES, checkpoint=checkpoint)


def saved(run: Path) -> list[int]:
    return saved_steps(run / "checkpoints")


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Callable[[Write], None]:
    """Puts something before the writing of every file."""

    def install(before: Write) -> None:
        def write(path: Path, *arguments: Any, **options: Any) -> None:
            before(path)
            write_safetensors(path, *arguments, **options)

        monkeypatch.setattr(save, "write_safetensors", write)

    return install


# -- when -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("checkpoint", "steps"),
    [
        ({"every": 4, "keep_last": 9}, [6, 4]),
        ({"every": 0}, []),
        ({"every": 1, "keep_last": 1, "keep_every": 2}, [6, 5, 4, 2]),
    ],
)
def test_a_run_saves_at_intervals_and_at_its_end(
    checkpoint: dict[str, int], steps: list[int], tmp_path: Path
) -> None:
    ran((2, 1), config_of(**checkpoint), tmp_path)

    assert saved(tmp_path) == steps
    assert all(is_complete(tmp_path / "checkpoints" / f"step-{step}") for step in steps)


@pytest.mark.parametrize(
    ("suffix", "more", "warned"),
    [
        (".safetensors", [], "step-2.old: was step-2, and has files that no run has written, or"),
        (".json", [2], "step-2: cannot be removed (Operation not permitted), and stays"),
    ],
)
def test_a_checkpoint_that_cannot_be_removed_ends_no_run(
    suffix: str,
    more: list[int],
    warned: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name.startswith("step-2") and path.suffix == suffix:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    ran((1, 1), config_of(keep_last=1), tmp_path)

    assert saved(tmp_path) == [6, 4, *more]
    assert warned in capfd.readouterr().err


def test_a_users_copy_stays_under_the_name_of_another_step(tmp_path: Path) -> None:
    ran((1, 1), config_of(), tmp_path)
    shutil.copytree(tmp_path / "checkpoints" / "step-4", tmp_path / "checkpoints" / "step-3")
    config = tiny_config(train={"steps": 8}, batch=FEW_MICROBATCHES, checkpoint={"keep_last": 1})

    ran((1, 1), config, tmp_path, resume="auto")

    assert saved(tmp_path) == [8, 6, 3]


@pytest.mark.parametrize(("steps", "there"), [(6, [6]), (8, [8])])
def test_a_run_that_begins_from_another_ones_checkpoint_saves_its_own(
    steps: int, there: list[int], tmp_path: Path
) -> None:
    """Its last step at least; the step at which it begins is saved in the other run."""
    ran((1, 1), config_of(), tmp_path / "old")
    config = tiny_config(train={"steps": steps}, batch=FEW_MICROBATCHES, checkpoint={"every": 2})

    ran((1, 1), config, tmp_path / "new", resume=str(tmp_path / "old" / "checkpoints" / "step-6"))

    assert saved(tmp_path / "new") == there


def test_what_a_thread_writes_is_told_of_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    beat = Activity.note_progress

    def count(self: Activity) -> None:
        threads.append(threading.current_thread().name)
        beat(self)

    monkeypatch.setattr(Activity, "note_progress", count)

    ran((1, 1), config_of(every=50), tmp_path)

    files = len(list((tmp_path / "checkpoints" / "step-6").glob("*.safetensors")))
    assert threads.count("axsparse checkpoint") > 3 * files


# -- in the background ----------------------------------------------------------------------


def test_steps_go_on_while_the_disk_is_slow_and_what_is_saved_is_that_of_before(
    tmp_path: Path, hooked: Callable[[Write], None]
) -> None:
    may_write, at_three, there = threading.Event(), Ran(), {}
    hooked(lambda path: may_write.wait(60))

    def watch(trainer: Trainer) -> None:
        there[trainer.steps_done] = saved(tmp_path / "run")
        if trainer.steps_done == 3:
            note_state(at_three, trainer)
        if trainer.steps_done == 5:
            may_write.set()

    ran((1, 1), config_of(every=3), tmp_path / "run", look=around_step(watch))

    assert there == {step: [] for step in range(6)}
    assert saved(tmp_path / "run") == [6, 3]
    loaded = Ran()
    ran(
        (1, 1),
        config_of(),
        tmp_path / "other",
        resume=str(tmp_path / "run" / "checkpoints" / "step-3"),
        look=partial(note_state, loaded),
    )
    same_state(loaded, at_three)


def test_the_thread_and_its_work_have_ended_after_close() -> None:
    """One that frees tensors while the interpreter ends would abort the process."""
    others = threading.enumerate()
    background = Background()
    held = torch.ones(3)
    gone = weakref.ref(held)
    background.do(held.sum).result()
    del held
    until = time.monotonic() + 10
    while gone() is not None and time.monotonic() < until:
        time.sleep(0.001)
    assert gone() is None, "the work is forgotten once it is done"
    done = background.do(lambda: sum(range(10**6)))

    background.close()

    assert done.done()
    assert threading.enumerate() == others


def test_there_are_never_two_checkpoints_under_way(
    tmp_path: Path, hooked: Callable[[Write], None]
) -> None:
    written: list[str] = []

    def note(path: Path) -> None:
        if path.parent.name not in written:
            written.append(path.parent.name)
        assert path.parent.name == written[-1], "an earlier one is still being written"

    hooked(note)

    ran((2, 2), config_of(every=1, keep_last=9), tmp_path)

    assert written == [f"step-{step}.tmp" for step in range(1, 7)]
    assert saved(tmp_path) == [6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(("layout", "shard"), [((1, 2), True), ((2, 2), False)])
def test_replicas_write_a_part_each(
    layout: tuple[int, int], shard: bool, tmp_path: Path, hooked: Callable[[Write], None]
) -> None:
    """Each by a thread of its own."""
    written: dict[str, list[int]] = defaultdict(list)
    hooked(lambda path: written[path.name].append(threading.get_ident()))
    config = settings(config_of(every=50), samo={"zero_stage": int(shard)})

    ran(layout, config, tmp_path)

    assert [len(threads) for threads in written.values()] == [1] * 4
    assert len({thread for [thread] in written.values()}) == layout[0] * layout[1]


def test_memory_for_what_is_on_its_way_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `STAGING_BYTES`, and a tensor that is being written; not by the state."""
    limits: list[float] = []
    most = 0

    class Watched(CopyQueue):
        def __init__(self, limit_bytes: float) -> None:
            super().__init__(limit_bytes)
            limits.append(limit_bytes)

        def put(self, tensor: Tensor) -> None:
            nonlocal most
            super().put(tensor)
            most = max(most, self._held)

    monkeypatch.setattr(save, "CopyQueue", Watched)
    monkeypatch.setattr(save, "STAGING_BYTES", 20_000.0)

    ran((1, 1), config_of(every=6), tmp_path)

    assert limits == [20_000.0]
    assert 0 < most <= 20_000
    checkpoint = open_checkpoint(tmp_path / "checkpoints" / "step-6")
    assert sum(entry.bytes for entry in checkpoint.manifest.files.values()) > 100_000


# -- failures -------------------------------------------------------------------------------


def test_a_disk_that_is_full_ends_the_run_and_leaves_what_was_saved(
    tmp_path: Path, hooked: Callable[[Write], None]
) -> None:
    def fail(path: Path) -> None:
        if path.parent.name == "step-4.tmp" and "block1" in path.name:
            (path.parent / "notes.txt").touch()  # a file of the user
            raise OSError(errno.ENOSPC, "No space left on device")

    hooked(fail)

    with pytest.raises(
        OutputError,
        match=rf"^rank \d \(stage \d, replica \d\): checkpoint {tmp_path}/checkpoints/step-4.tmp: "
        r"cannot be written \(No space left on device\); free space there, or choose another "
        r"--run-dir \(in Python run_dir=\); checkpoints before it are still there$",
    ) as caught:
        ran((2, 2), config_of(), tmp_path)

    assert caught.value.on_all_ranks
    assert saved(tmp_path) == [2] and is_complete(tmp_path / "checkpoints" / "step-2")
    assert unfinished(tmp_path / "checkpoints") == []
    left = (tmp_path / "checkpoints" / "step-4.tmp").iterdir()
    assert [path.name for path in left] == ["notes.txt"]


@pytest.mark.parametrize("steps", [3, 6])
def test_a_program_that_goes_on_after_a_save_that_failed_is_saved_at_the_close(
    steps: int, tmp_path: Path, hooked: Callable[[Write], None]
) -> None:
    is_full = [True]

    def fail(path: Path) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device")

    hooked(fail)
    trainer = Trainer(mlp(), vector_data(), config_of(every=100), run_dir=str(tmp_path / "run"))
    for _ in range(steps):
        trainer.step()
    with pytest.raises(OutputError, match="No space left on device"):
        trainer.save()
    is_full.clear()
    trainer.close()

    assert saved(tmp_path / "run") == [steps]


def test_a_frozen_value_whose_file_is_gone_is_saved_as_it_is_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = [nn.Linear(16, 16).requires_grad_(False), nn.Linear(16, 16), nn.Linear(16, 5)]
    plain = from_sequential(modules, summed_loss)
    state = {
        name: torch.randn_like(each) for name, each in nn.Sequential(*modules).state_dict().items()
    }
    start = images.write_safetensors(tmp_path / "start.safetensors", state)
    config = tiny_config(precision="bf16", train={"steps": 2}, batch=FEW_MICROBATCHES)
    model = start_from(plain, open_weights(start))
    trainer = Trainer(model, vector_data(), config, run_dir=str(tmp_path / "run"))
    (tmp_path / "start.safetensors").unlink()

    trainer.train()

    assert capsys.readouterr().err.count("frozen parameters are saved in bfloat16, since") == 1
    kept = CheckpointFiles(open_checkpoint(tmp_path / "run" / "checkpoints" / "step-2"))
    assert torch.equal(kept.value("0.weight", (16, 16)), state["0.weight"].bfloat16())


def no_folder(folder: Path, step: int) -> Path:
    raise OSError(errno.EROFS, "Read-only file system")


def gone(partial: Path, manifest: bytes) -> Path:
    shutil.rmtree(partial.parent)
    return commit(partial, manifest)


def no_second_commit(partial: Path, manifest: bytes) -> Path:
    if partial.name == "step-4.tmp":
        raise OSError(errno.EIO, "Input/output error")
    return commit(partial, manifest)


def other_bytes(folder: Path, name: str) -> FileEntry:
    entry = read_entry(folder, name)
    return entry.model_copy(update={"xxh3": "0" * 32}) if "block0" in name else entry


def nothing(folder: Path, name: str) -> FileEntry:
    (folder / name).unlink()
    return read_entry(folder, name)


def elsewhere(folder: Path, name: str) -> FileEntry:
    entry = read_entry(folder, name)
    if "head" in name:
        (folder / name).unlink()
    return entry


@pytest.mark.parametrize(
    ("function", "instead", "text", "left"),
    [
        ("checkpoint_folder.begin", no_folder, r"checkpoints: cannot be written \(Read-only f", []),
        ("checkpoint_folder.commit", no_second_commit, r"be written \(Input/output error\)", [2]),
        (
            "checkpoint_folder.commit",
            gone,
            r"\(No such file or directory\); remove nothing there while a run trains, and choose "
            r"another --run-dir \(in Python run_dir=\)$",
            [],
        ),
        ("saver.read_entry", other_bytes, r"\(0001-block0.safetensors reads otherwise than it", []),
        ("saver.read_entry", nothing, "another one; it was written a moment ago", []),
        ("saver.read_entry", elsewhere, "0 does not see 0003-head.safetensors as it was wri", []),
    ],
)
def test_what_cannot_be_saved_ends_the_run(
    function: str,
    instead: Callable[..., object],
    text: str,
    left: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"axsparse.training.checkpoint.{function}", instead)

    with pytest.raises(OutputError, match=text):
        ran((2, 1), config_of(), tmp_path)

    assert saved(tmp_path) == left


def test_a_run_that_loses_its_way_keeps_what_it_was_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third step of the first epoch meets a sample that is no number."""
    data = vector_data(infinite=int(samples_of_step(30, 12, 2, 11)[0]))
    monkeypatch.setattr("axsparse.training.step.PATIENCE", 1)

    with pytest.raises(TrainingError, match="no step could update"):
        ran((2, 1), config_of(), tmp_path, model=lambda config: mlp(), data=data)

    assert saved(tmp_path) == [2] and is_complete(tmp_path / "checkpoints" / "step-2")


def test_a_rank_that_fails_alone_leaves_nothing_half_named(
    tmp_path: Path, hooked: Callable[[Write], None]
) -> None:
    may_write = threading.Event()
    hooked(lambda path: may_write.wait(60))

    def fail(trainer: Trainer) -> None:
        if trainer.steps_done == 2 and trainer.coords.rank == 1:
            may_write.set()
            raise RuntimeError("a layer of glass")

    with pytest.raises(RuntimeError, match="glass"):
        ran((2, 1), config_of(), tmp_path, look=around_step(fail))

    assert saved(tmp_path) == []
    assert [path.name for path in unfinished(tmp_path / "checkpoints")] == ["step-2.tmp"]


def test_what_appears_when_a_rank_fails_has_appeared_when_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may continue there at once; a thread must not be at it any more."""
    may_commit = threading.Event()

    def slow(partial: Path, manifest: bytes) -> Path:
        may_commit.wait(60)
        return commit(partial, manifest)

    monkeypatch.setattr("axsparse.training.checkpoint.checkpoint_folder.commit", slow)

    def fail(trainer: Trainer) -> None:
        saver = trainer._saver
        assert saver is not None
        while trainer.steps_done == 4 and saver.is_writing:
            time.sleep(0.001)
        if trainer.steps_done == 5:
            assert saver.is_writing, "it has not begun to appear"
            threading.Timer(0.3, may_commit.set).start()
            raise RuntimeError("a layer of glass")

    with pytest.raises(RuntimeError, match="glass"):
        ran((1, 1), config_of(every=4), tmp_path, look=around_step(fail))

    assert saved(tmp_path) == [4]
