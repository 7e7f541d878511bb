"""The directory of a run: a new one, one that is gone on with, and which checkpoint that means."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.mpirun import run_alone
from support.resuming import ran
from support.runs import on_ranks, tiny_config, token_data

from axsparse.config.load import configure
from axsparse.config.schema import CheckpointConfig, Config
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import (
    ConfigError,
    DataError,
    InUseError,
    MissingInputError,
    OutputError,
)
from axsparse.runtime.files.run_folder import RunLock, RunMark
from axsparse.training.checkpoint import checkpoint_folder
from axsparse.training.checkpoint.verification import checkpoint_of, open_checkpoint, steps_in
from axsparse.training.progress import BestEntry, Progress
from axsparse.training.run_directory import (
    RunDir,
    find_run,
    make_run_dir,
    open_run_dir,
    rewind_metrics,
    save_config,
)


def loaded(run_dir: Path | str = "auto", steps: int = 9) -> Config:
    config = tiny_config(run_dir=str(run_dir), train={"steps": steps})
    return config.with_origins("quick", {} if run_dir == "auto" else {"run_dir": "--run-dir"})


def opened_here(
    transport: Transport, source: Config, resume: str | None, *, overwrite: bool = False
) -> RunDir:
    with ExitStack() as locks:
        found = find_run(source, transport, resume, locks)
        run = open_run_dir(source, transport, found, locks, overwrite=overwrite)
        locks.pop_all()
    return run


def opened(source: Config, resume: str | None = "auto", **how: bool) -> RunDir:
    """By one rank, which lets go of the directory at once."""
    (found,) = on_ranks(1, lambda transport: opened_here(transport, source, resume, **how))
    assert found.lock is not None
    found.lock.release()
    return found


def test_a_run_that_cannot_begin_lets_go_of_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OutputError("the disk is full")

    monkeypatch.setattr(RunDir, "begin", fail)
    with pytest.raises(OutputError) as caught:
        ran((1, 1), loaded(), tmp_path / "run")

    RunLock(tmp_path / "run").release()
    assert "the disk is full" in str(caught.value)


def test_a_copy_by_links_keeps_its_own_settings(tmp_path: Path) -> None:
    save_config(loaded(tmp_path), tmp_path)
    before = (tmp_path / "config.yaml").read_text()
    os.link(tmp_path / "config.yaml", tmp_path / "copy")

    save_config(loaded(tmp_path, steps=12), tmp_path)

    assert (tmp_path / "copy").read_text() == before
    assert "steps: 12" in (tmp_path / "config.yaml").read_text()


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step}"


# -- a new run ------------------------------------------------------------------------------


def test_rank_0_makes_the_directory_and_all_ranks_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    makers = []

    def make(wanted: Config, **how: bool) -> tuple[Path, RunLock]:
        makers.append(wanted.name)
        return make_run_dir(wanted, **how)

    monkeypatch.setattr("axsparse.training.run_directory.make_run_dir", make)

    found = on_ranks(3, lambda transport: opened_here(transport, loaded(), None))

    assert [one.path for one in found] == [Path("runs/quick")] * 3
    assert [one.lock is not None for one in found] == [True, False, False]
    assert makers == ["quick"]


def test_a_run_marks_its_directory_before_it_writes_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[set[str]] = []
    mark = RunMark.of

    def noted(path: Path) -> RunMark:
        there.append({one.name for one in path.iterdir()})
        return mark(path)

    monkeypatch.setattr(RunMark, "of", noted)
    ran((1, 1), tiny_config(train={"steps": 2}, checkpoint={"every": 1}), tmp_path / "run")

    assert there[0] == {"run.lock"}
    assert (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_run_begins_with_its_configuration_and_a_place_for_checkpoints_next_to_other_files(
    tmp_path: Path,
) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "notes.txt").write_text("of the user")
    (tmp_path / "new" / "checkpoints").mkdir()
    found = opened(loaded(tmp_path / "new"), None)

    found.begin(tiny_config())

    assert sorted(path.name for path in found.path.iterdir()) == [
        *("checkpoints", "config.yaml", "metrics.jsonl", "notes.txt", "run.json", "run.lock")
    ]
    assert (found.path / "notes.txt").read_text() == "of the user"
    assert f"run_dir: {tmp_path / 'new'}" in (found.path / "config.yaml").read_text()
    (found.path / "checkpoints").rmdir()
    (found.path / "checkpoints").write_text("in the way")
    with pytest.raises(OutputError, match=r"checkpoints: cannot be written \(File exists\)"):
        found.begin(tiny_config())


# -- a directory whose run recorded nothing -------------------------------------------------


def test_a_run_that_overwrites_removes_what_another_left_and_nothing_else(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = run / "checkpoints"
    (steps / "step-4").rename(steps / "step-4.tmp")
    (steps / "of the user").mkdir()
    for name in ("trace", "healing"):
        (run / name).mkdir()
    notes = [folder / "notes.txt" for folder in (run, run / "trace", steps / "step-2")]
    names = ("mask.safetensors", "wandb-id", "trace/steps-2-3.json", "healing/a.safetensors")
    for path in (*notes, *(run / name for name in names)):
        path.touch()
    lock = RunLock(run)
    with pytest.raises(OutputError, match=rf"^{run}: is in use by a Trainer of this"):
        make_run_dir(loaded(run), overwrite=True)
    with pytest.raises(InUseError, match="is in use by a Trainer of this program; close"):
        make_run_dir(loaded(run))  # which names neither a resume nor overwrite=True
    lock.release()

    found = opened(loaded(run), None, overwrite=True)
    assert checkpoint(run, 2).is_dir() and (run / "metrics.jsonl").stat().st_size
    found.begin(loaded(run))
    path = found.path

    said = (
        f"{steps}/step-2.old: was step-2, and has files that no run has written, or that cannot be "
        "deleted"
    )
    assert capsys.readouterr().err == f"axsparse: warning: {said}\n"
    left = {one.name for one in path.iterdir()}
    assert left == {
        *("metrics.jsonl", "notes.txt", "run.json", "run.lock", "config.yaml"),
        *("checkpoints", "trace"),
    }
    assert [one.name for one in (run / "trace").iterdir()] == ["notes.txt"]
    # What is unfinished goes with the next checkpoint, which goes around files of the user.
    gone = steps / "step-2.old"
    assert {one.name for one in steps.iterdir()} == {gone.name, "step-4.tmp", "of the user"}
    assert [one.name for one in gone.iterdir()] == ["notes.txt"]
    checkpoint_folder.begin(steps, 2)
    assert (gone / "notes.txt").exists()


def test_a_run_that_overwrites_leaves_a_mask_file_of_the_users(run: Path) -> None:
    save_file({"mask": torch.ones(2)}, run / "mask.safetensors")

    opened(loaded(run), None, overwrite=True).begin(loaded(run))

    assert load_file(run / "mask.safetensors")["mask"].sum() == 2


def test_a_run_that_is_killed_while_it_overwrites_another_begins_anew(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = checkpoint_folder.remove

    def remove_and_kill(path: Path) -> None:
        remove(path)
        raise KeyboardInterrupt

    config = loaded(run)
    overwriting = opened(config, None, overwrite=True)
    monkeypatch.setattr(checkpoint_folder, "remove", remove_and_kill)
    with pytest.raises(KeyboardInterrupt):
        overwriting.begin(config)
    monkeypatch.undo()
    left = max(steps_in(run))
    for named in (checkpoint(run, left), run):
        assert opened(config, str(named)).checkpoint is not None, "the user names it"

    found = opened(config)

    assert found.notes == (f"{run} has no checkpoint; starts from the beginning",)
    found.begin(config)
    assert not (run / "metrics.jsonl").read_text()
    assert not RunMark.of(run).is_overwriting


@pytest.mark.parametrize(
    "fails",
    [
        "open_data",
        "build_state",
        "Step.__init__",
        "evaluate",
        "Step.score_gradients",
        "check_layers",
    ],
)
def test_a_run_that_overwrites_and_cannot_train_leaves_all_that_is_there(
    fails: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that trains replaces it, though it is evaluated and its masks are drawn first."""

    def files() -> dict[Path, bytes]:
        found = [path for path in run.rglob("*") if path.is_file()]
        users = {"run.lock", "heartbeat"}  # files that say who uses a directory
        return {path: path.read_bytes() for path in found if not {*path.parts} & users}

    def fail(*_: object, **__: object) -> None:
        raise ConfigError("cannot train")

    train = {"steps": 1, "eval_first": fails == "evaluate", "check_layers": True, "eval_steps": 1}
    config = tiny_config(train=train, checkpoint={"every": 0}, pruning={"method": "snip"})
    before, own = files(), dict[str, Any](validation=token_data(), overwrite=True)
    place = "step" if fails == "check_layers" else "trainer"
    with monkeypatch.context() as patched:
        patched.setattr(f"axsparse.training.{place}.{fails}", fail)
        with pytest.raises(ConfigError, match="cannot train"):
            ran((1, 1), config, run, **own)
    assert files() == before

    ran((1, 1), config, run, **own)

    records = [*map(json.loads, (run / "metrics.jsonl").read_text().splitlines())]
    assert [record["step"] for record in records if "loss" in record] == [1]
    assert not [*(run / "checkpoints").iterdir()]
    assert "snip" in (run / "config.yaml").read_text()


def test_runs_are_named_and_numbered_and_a_new_one_gets_the_last_directory_if_it_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one before it: `--resume auto` means the last one."""
    monkeypatch.chdir(tmp_path)
    # Nobody has written a metric yet: what keeps others out is the lock.
    made = [make_run_dir(loaded()) for _ in range(2)]
    for _, lock in made:
        lock.release()
    made += [make_run_dir(loaded()) for _ in range(2)]

    paths = [str(path) for path, _ in made]
    assert paths == ["runs/quick", "runs/quick-2", "runs/quick-2", "runs/quick-3"]
    assert Path("runs/quick-3").is_dir()


def test_a_run_may_overwrite_the_directory_that_its_program_is_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    path, lock = make_run_dir(loaded("."), overwrite=True)

    lock.release()
    assert path.samefile(tmp_path)


def test_of_two_jobs_that_find_a_directory_free_one_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_have_looked = threading.Barrier(2)

    def lock(path: Path) -> RunLock:
        both_have_looked.wait(60)
        return RunLock(path)

    monkeypatch.setattr("axsparse.training.run_directory.RunLock", lock)

    def claim(_: int) -> RunLock | str:
        try:
            return make_run_dir(loaded(tmp_path))[1]
        except OutputError as rejected:
            return str(rejected)

    with ThreadPoolExecutor(2) as jobs:
        ends = list(jobs.map(claim, range(2)))

    [message] = [end for end in ends if isinstance(end, str)]
    assert "is in use by" in message


# -- which one is gone on with --------------------------------------------------------------


def test_auto_starts_where_there_is_nothing_yet_and_says_so(run: Path, tmp_path: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    for name in ("run.json", "config.yaml", "metrics.jsonl"):
        (run / name).unlink()
    RunMark.of(run)  # it ended before it saved anything

    new, begun = opened(loaded(tmp_path / "new")), opened(loaded(run))

    assert new.checkpoint is None and begun.checkpoint is None
    assert new.path == tmp_path / "new"
    assert new.notes == ("there is no run to go on with; starts from the beginning",)
    assert begun.notes == (f"{run} has no checkpoint; starts from the beginning",)


def write_run(path: Path, identifier: str) -> None:
    """Make a checkpoint one of another run."""
    manifest = checkpoint_folder.parse_manifest((path / "manifest.json").read_bytes())
    ours = manifest.model_copy(update={"run": identifier})
    (path / "manifest.json").write_bytes(checkpoint_folder.manifest_bytes(ours))


def test_a_branch_begins_again_where_it_began_until_it_has_a_checkpoint(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    branch, config = tmp_path / "branch", loaded(tmp_path / "branch")
    monkeypatch.chdir(run)
    opened(config, "checkpoints/step-4").begin(config)  # and is killed
    monkeypatch.chdir(tmp_path)

    found = on_ranks(2, lambda transport: opened_here(transport, config, "auto"))

    assert [one.path for one in found] == [branch] * 2
    assert {one.checkpoint and one.checkpoint.path for one in found} == {checkpoint(run, 4)}
    assert found[0].lock is not None
    found[0].lock.release()
    found[0].begin(config)
    named = opened(configure(branch / "config.yaml"), str(branch))
    assert (named.path, named.checkpoint) == (branch, found[0].checkpoint)
    other = opened(loaded(tmp_path / "other"), str(branch))
    assert (other.path, other.checkpoint) == (tmp_path / "other", found[0].checkpoint)
    manifest = checkpoint(run, 4) / "manifest.json"
    written = manifest.read_bytes()
    write_run(checkpoint(run, 4), "another")
    for way, where in (("auto", config), (str(branch), configure(branch / "config.yaml"))):
        with pytest.raises(MissingInputError, match="step-4, which is another run's now; put it"):
            opened(where, way)
    manifest.write_bytes(written)
    assert opened(config).checkpoint == found[0].checkpoint
    checkpoint(run, 4).rename(tmp_path / "away")
    gone = (
        f"{branch} has saved no checkpoint yet and began from {checkpoint(run, 4)}, which is gone; "
        "put it back, or start anew in another"
    )
    with pytest.raises(MissingInputError, match=f"^{gone}"):
        opened(config)

    mark = RunMark.of(branch)
    checkpoint(run, 5).rename(checkpoint(branch, 5))
    mark.note(saved=True)
    for resume in ("auto", str(checkpoint(branch, 5)), None):
        with pytest.raises(OutputError, match="step-5 is another run's checkpoint, which would be"):
            opened(config, resume, overwrite=resume is None)
    write_run(checkpoint(branch, 5), mark.identifier)
    own = opened(config)
    assert own.checkpoint is not None and own.checkpoint.path == checkpoint(branch, 5)

    opened(config, None, overwrite=True).begin(config)  # and is killed
    assert opened(config).notes == (f"{branch} has no checkpoint; starts from the beginning",)
    mark.note(saved=True)  # by the saver, which is made before the run begins
    assert RunMark.of(branch).began_from is None
    with pytest.raises(MissingInputError, match=", or start anew in another"):
        opened(config)


@pytest.mark.parametrize("name", ["step-4", "latest", "copy", "elsewhere"])
def test_a_checkpoint_before_others_is_no_way_on_in_its_run_by_whatever_name(
    run: Path, tmp_path: Path, name: str
) -> None:
    there = tmp_path / name if name == "elsewhere" else run / "checkpoints" / name
    if name == "copy":
        shutil.copytree(checkpoint(run, 4), there)
    elif name != "step-4":
        there.symlink_to(checkpoint(run, 4))

    with pytest.raises(ConfigError, match="the run has a later checkpoint, step-5"):
        opened(loaded(run), str(there))


@pytest.mark.parametrize("how", ["copied", "moved"])
def test_the_config_of_a_run_means_the_directory_that_it_is_in(
    how: str, run: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other) if how == "copied" else run.rename(other)

    config = configure(other / "config.yaml")

    assert opened(config).path == opened(config, str(other)).path == other
    (other / "run.json").unlink()
    assert configure(other / "config.yaml").run_dir != str(other)


def test_a_checkpoint_of_a_copy_is_another_runs(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "copy"))
    for each in (run, copy):
        ran((1, 1), configure(run / "config.yaml", ["train.steps=6"]), each, resume="auto")
        assert opened(loaded(each)).checkpoint is not None
    shutil.rmtree(checkpoint(run, 6))
    shutil.copytree(checkpoint(copy, 6), checkpoint(run, 6))

    with pytest.raises(OutputError, match="step-6 is another run's checkpoint, which would be"):
        opened(loaded(run))


def gone_on(run: Path, steps: int, **how: Any) -> None:
    """With a checkpoint of each step."""
    settings = {"checkpoint": {"every": 1, "keep_last": 9}, "train": {"steps": steps}}
    ran((1, 1), tiny_config(**settings), run, **how)


def test_an_older_mark_that_a_backup_puts_back_is_of_the_same_run(tmp_path: Path) -> None:
    run, older = tmp_path / "run", []
    for steps in (1, 2, 3):
        gone_on(run, steps, resume="auto")
        older.append((run / "run.json").read_bytes())
    changed = RunMark.of(run).starts

    for mark in older:
        (run / "run.json").write_bytes(mark)
        found = opened(loaded(run))

        assert found.checkpoint is not None and found.checkpoint.path == checkpoint(run, 3)
        found.begin(loaded(run))
        assert RunMark.of(run).starts[:-1] == changed
        assert opened(loaded(run)).checkpoint == found.checkpoint
    # Of a run that was overwriting another one.
    RunMark.of(run).note(overwrites=True)
    assert opened(loaded(run)).checkpoint == found.checkpoint


def test_a_run_that_has_overwritten_another_knows_its_checkpoints_from_the_others(
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    for steps in (1, 3):
        gone_on(run, steps, resume="auto")
    checkpoint(run, 3).rename(tmp_path / "backup")
    gone_on(run, 2, overwrite=True)

    found = opened(loaded(run))

    assert found.checkpoint is not None and found.checkpoint.path == checkpoint(run, 2)
    (tmp_path / "backup").rename(checkpoint(run, 3))
    with pytest.raises(OutputError, match="step-3 is another run's checkpoint, which would be"):
        opened(loaded(run))


def test_a_run_that_is_told_to_stop_before_it_overwrites_another_leaves_that(run: Path) -> None:
    def stop(trainer: Any) -> None:
        trainer._stop.receive(signal.SIGUSR1)

    stopped = ran((1, 1), tiny_config(train={"steps": 3}), run, overwrite=True, look=stop).stopped

    assert stopped == "stopped before the first step, with nothing to save; start it again"
    assert steps_in(run) == [5, 4, 2]
    assert RunMark.of(run).starts == [RunMark.of(run).identifier]


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("name", ["step-3", "step-100"])
def test_what_a_user_puts_in_the_place_of_a_checkpoint_stays(
    name: str, is_file: bool, run: Path
) -> None:
    own = run / "checkpoints" / name
    if is_file:
        own.write_text("the user's")
    else:
        own.mkdir()
        for file in ("manifest.json", "weights.bin"):
            (own / file).write_text("the user's")

    if name == "step-3":  # which a run that goes on after step 5 does not write
        assert opened(loaded(run)).checkpoint
    hows = ({"resume": None, "overwrite": True}, {"resume": "auto"})
    for how in hows if name == "step-100" else hows[:1]:
        with pytest.raises(OutputError, match=f"{name} is no checkpoint of a run, and in the pla"):
            opened(loaded(run), **how)
        RunLock(run).release()
        assert own.is_file() or (own / "manifest.json").read_text() == "the user's"
        assert steps_in(run) == [5, 4, 2]


def test_a_run_overwrites_nothing_while_the_disk_of_its_checkpoints_is_away(run: Path) -> None:
    (run / "checkpoints").rename(run.with_name("away"))
    (run / "checkpoints").symlink_to(run.with_name("disk"))

    with pytest.raises(OutputError, match=r"checkpoints is a link to \S+/disk, which is no folder"):
        make_run_dir(loaded(run), overwrite=True)

    assert (run / "metrics.jsonl").stat().st_size and (run / "checkpoints").is_symlink()


@pytest.mark.parametrize("resume", ["auto", "the run"])
@pytest.mark.parametrize(
    ("lost", "error", "said"),
    [
        (("run.json",), ConfigError, "metrics.jsonl and config.yaml and checkpoints, but no wh"),
        (("run.json", "metrics.jsonl", "config.yaml"), ConfigError, "has checkpoints, but no who"),
        (("checkpoints",), MissingInputError, "has (saved checkpoints|no checkpoint)"),
    ],
)
def test_a_run_of_which_a_part_is_missing_is_neither_begun_anew_nor_changed(
    lost: tuple[str, ...], error: type[Exception], said: str, resume: str, run: Path
) -> None:
    for name in lost:
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "run.lock"}

    with pytest.raises(error, match=said) as kept:
        opened(loaded(run), "auto" if resume == "auto" else str(run))
    RunLock(run).release()
    assert kept.value, "an error that a program keeps holds no lock"
    if "run.json" in lost:
        with pytest.raises(OutputError, match=r"but no whole run\.json, the mark of a run"):
            opened(loaded(run), None)

    after = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != "run.lock"}
    assert after == before


def test_records_that_somebody_removed_are_missed_in_a_note(run: Path) -> None:
    records = run / "metrics.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    said = f"note: {records} lacks the records after step {{}} until step 5"

    records.unlink()
    assert opened(loaded(run)).notes[-1] == said.format(0)
    last = next(number for number, line in enumerate(lines) if '"step": 3' in line)
    records.write_text("".join(lines[: last + 1]))  # a backup of an earlier moment
    assert opened(loaded(run)).notes[-1] == said.format(3)
    records.write_text("".join(lines))
    assert len(opened(loaded(run)).notes) == 1


def test_a_best_checkpoint_that_somebody_removed_is_forgotten(run: Path) -> None:
    newest = open_checkpoint(checkpoint(run, 5))
    newest.manifest.progress.best = BestEntry(step=2, loss=1.0)

    for steps, best in (((5, 4, 2), 2), ((5, 4), None)):
        progress = RunDir(run, newest, steps).progress
        assert progress is not None
        assert (progress.best and progress.best.step) == best
    manifest = checkpoint(run, 5) / "manifest.json"
    manifest.write_bytes(checkpoint_folder.manifest_bytes(newest.manifest))
    config = loaded(run).model_copy(update={"checkpoint": CheckpointConfig(keep_best=True)})
    assert len(opened(config).notes) == 1
    shutil.rmtree(checkpoint(run, 2))
    _, note = opened(config).notes
    assert note.startswith("note: the checkpoint of step 2, with the lowest validation loss 1.0000")


@pytest.mark.parametrize(
    ("how", "is_shared"),
    [
        ("copied", True),
        ("copied, and the original begun", True),
        ("copied, and the original moved", True),
        ("another run", True),
        ("a link into another run", True),
        ("a copy by links", True),
        ("moved", False),
        ("the disk is mounted elsewhere", False),
        ("copied, and the link replaced by a copy", False),
    ],
)
def test_files_behind_a_link_belong_to_one_run(how: str, is_shared: bool, tmp_path: Path) -> None:
    """A copy or another run would remove the checkpoints of the first one as outdated."""
    first, other, disk = tmp_path / "first", tmp_path / "other", tmp_path / "disk"
    config = tiny_config(train={"steps": 2}, checkpoint={"every": 1})
    ran((1, 1), config, first)
    if how == "a copy by links":
        shutil.copytree(first, other, copy_function=os.symlink)
    if how in ("another run", "a link into another run"):
        ran((1, 1), config, other)
        shutil.rmtree(other / "checkpoints")
    if how == "a link into another run":
        (other / "checkpoints").symlink_to(first / "checkpoints")
    else:
        (first / "checkpoints").rename(disk)
        (first / "checkpoints").symlink_to(disk)
    if how in ("another run", "copied, and the original begun"):
        opened(loaded(first)).begin(config)
    if how == "another run":
        (other / "checkpoints").symlink_to(disk)
    if how.startswith("copied"):
        shutil.copytree(first, other, symlinks=True)
    if how == "copied, and the original moved":
        first = first.rename(tmp_path / "moved")
        opened(loaded(first)).begin(config)
    if how == "moved":
        opened(loaded(first)).begin(config)
        first.rename(other)
    if how == "the disk is mounted elsewhere":
        opened(loaded(first)).begin(config)
        disk = disk.rename(tmp_path / "mounted")
        (first / "checkpoints").unlink()
        (first / "checkpoints").symlink_to(disk)
        first.rename(other)
    if how == "copied, and the link replaced by a copy":
        (other / "checkpoints").unlink()
        shutil.copytree(disk, other / "checkpoints")

    if is_shared:
        for resume, overwrite in (("auto", False), (None, True)):
            with pytest.raises(OutputError, match=f"may be the files of the run in {first}; put"):
                opened(loaded(other), resume, overwrite=overwrite)
    else:
        found = opened(loaded(other))
        found.begin(config)
        assert found.checkpoint is not None and found.checkpoint.step == 2
        opened(loaded(other)).begin(config)


def test_checkpoints_on_another_disk_are_read_by_their_links_and_never_deleted(
    run: Path, tmp_path: Path
) -> None:
    for step in (2, 4, 5):
        there = tmp_path / f"disk-{step}"
        checkpoint(run, step).rename(there)
        checkpoint(run, step).symlink_to(there)

    found = opened(loaded(run))

    assert found.checkpoint is not None and found.checkpoint.step == 5
    (tmp_path / "disk-5").rename(tmp_path / "away")
    found = opened(loaded(run))
    assert found.checkpoint is not None and found.checkpoint.step == 4
    said = f"step-5: is a link to {tmp_path / 'disk-5'}, which is away"
    assert found.notes[0].endswith(said)
    checkpoint_folder.remove(checkpoint(run, 4))
    assert not os.path.lexists(checkpoint(run, 4)) and (tmp_path / "disk-4").is_dir()


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_run_whose_directory_was_moved_ends_at_its_next_checkpoint(
    is_begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moved before the folder of the checkpoint is made, or after that."""
    run, there = tmp_path / "run", tmp_path / "elsewhere"
    run.mkdir()
    config = tiny_config(train={"steps": 4}, checkpoint={"every": 2})
    check, begin = RunMark.check, checkpoint_folder.begin

    def moved_before_the_last(mark: RunMark) -> None:
        if checkpoint(run, 2).is_dir() and not is_begun:
            run.rename(there)
        check(mark)

    def moved_after(folder: Path, step: int) -> None:
        begin(folder, step)
        if step == 4 and is_begun:
            run.rename(there)

    monkeypatch.setattr(RunMark, "check", moved_before_the_last)
    monkeypatch.setattr(checkpoint_folder, "begin", moved_after)
    mark = RunMark.of(run)
    with pytest.raises(OutputError, match="run is not the directory of this run any more"):
        ran((1, 1), config, run)
    monkeypatch.undo()

    assert not run.exists()
    run.mkdir()
    RunMark.of(run)
    with pytest.raises(OutputError, match="moved, removed or replaced"):
        mark.check()
    found = opened(loaded(there))
    assert found.checkpoint is not None and found.checkpoint.step == 2


@pytest.mark.parametrize(("steps", "more"), [(9, ""), (5, "; train.steps 5 asks for no more")])
def test_auto_takes_the_newest_step_whatever_the_clock_says(
    steps: int, more: str, run: Path
) -> None:
    os.utime(checkpoint(run, 2), (2**31, 2**31))

    found = opened(loaded(run, steps))

    assert found.checkpoint is not None and found.checkpoint.step == 5
    assert found.notes == (f"goes on from {run}/checkpoints/step-5, after step 5{more}",)


@pytest.mark.parametrize("others", [("quick",), ("quick", "quick-11", "quick-2-b"), ()])
def test_auto_without_a_directory_means_the_last_run_of_the_name(
    others: tuple[str, ...], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where runs before it were removed; a folder without a mark is no run."""
    monkeypatch.chdir(tmp_path)
    for name in others:
        (tmp_path / "runs" / name).mkdir(parents=True)
    (tmp_path / "runs").mkdir(exist_ok=True)
    if others:
        RunMark.of(tmp_path / "runs" / "quick")
    run.rename(tmp_path / "runs" / "quick-10")

    found = opened(loaded())

    assert found.path == Path("runs/quick-10")
    assert found.checkpoint is not None and found.checkpoint.step == 5
    path, lock = make_run_dir(loaded())
    assert str(path) == "runs/quick-11"
    lock.release()


def test_auto_leaves_the_run_of_a_configuration_whose_name_ends_in_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = loaded(), loaded().with_origins("quick-2", {})
    opened(second).begin(second)

    found = opened(first)

    assert (found.path, found.found) == (Path("runs/quick"), None)
    found.begin(first)
    assert opened(first).found == Path("runs/quick")
    (tmp_path / "runs" / "quick" / "metrics.jsonl").write_text("of quick")
    third = opened(first, None)
    assert third.path == Path("runs/quick-3")
    assert opened(second).found == Path("runs/quick-2")
    (tmp_path / "runs" / "quick").rename(tmp_path / "runs" / "other")
    assert opened(loaded().with_origins("other", {})).found == Path("runs/other")


@pytest.mark.parametrize("resume", ["auto", "run", "branch"])
@pytest.mark.parametrize("killed", ["before the new one has its name", "after that"])
def test_a_run_that_is_killed_while_it_replaces_its_only_checkpoint_has_one(
    killed: str, resume: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        checkpoint_folder.remove(checkpoint(run, step))
    RunMark.of(run).note(saved=True)
    written = shutil.copytree(checkpoint(run, 5), run / "checkpoints" / "step-5.tmp")
    manifest = (written / "manifest.json").read_bytes()
    (written / "manifest.json").unlink()

    def kill(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if killed == "after that":
            patch.setattr(checkpoint_folder, "delete", kill)
        else:
            rename = Path.rename
            patch.setattr(
                Path, "rename", lambda a, b: kill() if a.suffix == ".tmp" else rename(a, b)
            )
        with pytest.raises(KeyboardInterrupt):
            checkpoint_folder.commit(written, manifest)
    assert (run / "checkpoints" / "step-5.old").is_dir()

    config = loaded(tmp_path / "other" if resume == "branch" else run)
    if resume != "auto":
        resume = str(run)
    found = opened(config, resume)

    assert found.checkpoint is not None and found.checkpoint.path == checkpoint(run, 5)
    assert not written.exists()


def test_while_another_job_replaces_a_checkpoint_nobody_finishes_that(
    run: Path, tmp_path: Path
) -> None:
    for step in (2, 4):
        checkpoint_folder.remove(checkpoint(run, step))
    checkpoint(run, 5).rename(run / "checkpoints" / "step-5.tmp")
    (run / "checkpoints" / "step-5.old").mkdir()
    lock = RunLock(run)

    with pytest.raises(MissingInputError, match="has saved checkpoints, and"):
        opened(loaded(tmp_path / "other"), str(run))

    lock.release()
    assert not checkpoint(run, 5).exists()


def test_several_damaged_ones_are_passed_over_by_all_ranks_alike(run: Path, tmp_path: Path) -> None:
    (checkpoint(run, 5) / "0003-head.safetensors").unlink()
    os.truncate(checkpoint(run, 4) / "0000-embed.safetensors", 8)
    (run / "checkpoints" / "step-6.tmp").mkdir()
    shutil.copytree(checkpoint(run, 2), checkpoint(run, 7))

    found = on_ranks(3, lambda transport: opened_here(transport, loaded(run), "auto"))

    assert {one.checkpoint.step for one in found if one.checkpoint} == {2}
    assert len({one.notes for one in found}) == 1
    unfinished, seventh, fifth, fourth, _ = found[0].notes
    assert unfinished == f"passed over: checkpoint {run}/checkpoints/step-6.tmp: was not finished"
    assert "step-7: was saved after step 2; give it its name back" in seventh
    assert "step-5: 0003-head.safetensors cannot be read" in fifth
    assert "step-4: 0000-embed.safetensors has 8 bytes" in fourth
    for lock in (one.lock for one in found if one.lock is not None):
        lock.release()
    # A run that has only damaged ones does not start over.
    os.truncate(checkpoint(run, 2) / "0000-embed.safetensors", 8)
    before = (run / "metrics.jsonl").read_text()
    with pytest.raises(DataError, match=r"none of its 4 checkpoints is whole .*step-7: was saved"):
        opened(loaded(run))
    with pytest.raises(DataError, match=r"step-2: 0000-embed\.safetensors has 8 bytes"):
        opened(loaded(tmp_path / "other"), str(checkpoint(run, 2)))
    assert (run / "metrics.jsonl").read_text() == before
    RunLock(run).release()


@pytest.mark.parametrize("named", [".", "checkpoints", "checkpoints/step-5"])
@pytest.mark.parametrize("is_linked", [False, True])
def test_a_run_or_its_newest_checkpoint_may_be_named(
    is_linked: bool, named: str, run: Path, tmp_path: Path
) -> None:
    path = run / named
    if is_linked:
        (run / "checkpoints").rename(tmp_path / "disk")
        (run / "checkpoints").symlink_to(tmp_path / "disk")
        RunMark.of(run).note(at=str(run))
    assert checkpoint_of(path, None).step == 5
    copied = shutil.copytree(checkpoint(run, 5), tmp_path / "best")
    assert checkpoint_of(copied, None).step == 5

    for source in (loaded(), loaded(run)):
        found = opened(source, str(path))

        assert found.path.resolve() == run.resolve()
        assert found.checkpoint is not None and found.checkpoint.step == 5
    # A checkpoint begins a run of its own elsewhere.
    for there, step in ((run, 5), (checkpoint(run, 2), 2)):
        elsewhere = opened(loaded(tmp_path / f"other-{step}"), str(there))
        assert elsewhere.path == tmp_path / f"other-{step}"
        assert elsewhere.checkpoint is not None and elsewhere.checkpoint.step == step


def test_a_run_may_have_the_name_of_a_checkpoint(run: Path) -> None:
    assert checkpoint_of(run.rename(run.with_name("step-10")), None).step == 5


# -- records --------------------------------------------------------------------------------


DONE = {"step": 4, "evaluated": True, "masked": True}
RECORDS = [
    {"step": step, kind: 1.0} for kind in ("loss", "eval_loss", "masks") for step in (3, 4, 5)
]


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, ["loss 3", "loss 4", "eval_loss 3", "eval_loss 4", "masks 3", "masks 4"]),
        ({"evaluated": False}, ["loss 3", "loss 4", "eval_loss 3", "masks 3", "masks 4"]),
        ({"masked": False}, ["loss 3", "loss 4", "eval_loss 3", "eval_loss 4", "masks 3"]),
    ],
)
def test_records_after_the_checkpoint_are_taken_back_also_behind_a_link(
    changes: dict[str, bool], kept: list[str], tmp_path: Path
) -> None:
    path, log = tmp_path / "metrics.jsonl", tmp_path / "log.jsonl"
    path.symlink_to(log)
    lines = [json.dumps(record) for record in RECORDS]
    own = '{"mine": 1}'
    path.write_text("\n".join([own, "torn {", "[]", *lines, '{"step": 1, "loss"']))

    progress = Progress.at_start(Config()).model_copy(update={**DONE, **changes})
    rewind_metrics(path, progress)

    first, *left = [json.loads(line) for line in log.read_text().splitlines()]
    assert first == json.loads(own)
    assert [f"{list(record)[1]} {record['step']}" for record in left] == kept
    assert {*tmp_path.iterdir()} == {path, log} and path.is_symlink()
    rewind_metrics(path, None)
    assert path.read_text() == ""


REWIND = """
import sys
from pathlib import Path
from axsparse.config.schema import Config
from axsparse.training.progress import Progress
from axsparse.training.run_directory import rewind_metrics
rewind_metrics(Path(sys.argv[1]), Progress.at_start(Config()))
"""


def test_records_keep_their_letters_under_a_locale_of_ascii(tmp_path: Path) -> None:
    path, line = tmp_path / "metrics.jsonl", '{"größe": 1}\n'.encode()
    path.write_bytes(line)
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}

    done = run_alone(["-c", REWIND, str(path)], ascii_only, python=sys.executable)

    assert done.returncode == 0, str(done)
    assert path.read_bytes() == line


def test_a_run_whose_folder_may_not_be_read_is_refused(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> list[str]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("axsparse.training.run_directory.remains", refuse)

    with pytest.raises(MissingInputError, match=r"cannot be read \(Permission denied\); choose"):
        opened(loaded(run))
