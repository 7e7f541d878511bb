"""A run that hangs is ended by one report; a run that gets on is not."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from support.devices import Clock
from support.resuming import ran
from support.runs import job_alone, tiny_config, tiny_gpt, token_data, train_in_process

from axsparse.cli.prune_folder import reworded
from axsparse.data.dataset import Datasets
from axsparse.observe.phases import Phases
from axsparse.observe.watchdog.heartbeat import HEARTBEATS, Heartbeat, HeartbeatFolder
from axsparse.observe.watchdog.watchdog import REPORT_FILE, THREAD, Activity, Task, Watchdog
from axsparse.pipeline.engine import Engine
from axsparse.runtime.communication import Message
from axsparse.runtime.files.run_folder import RESUME_AUTO
from axsparse.runtime.grid import Grid
from axsparse.training.trainer import Trainer, build

TIMEOUT = 20.0
"""With this timeout a watchdog looks once a second."""


class Waits:
    """A back-off that only counts."""

    pauses = 0

    def pause(self) -> None:
        self.pauses += 1

    def reset(self) -> None:
        """There is nothing to reset."""


class Rank:
    """One rank of a job that is played: what it does, and its watchdog."""

    def __init__(self, job: Job, number: int) -> None:
        self.does = "works"
        self.backoff = Waits()
        self.phases = Phases(job.clock)
        self.awaited: list[str] = []
        self.activity = Activity(self.phases, self.backoff, lambda: self.awaited)
        self.activity.at("training", 7)
        self.activity.steps = 6
        self.dog = Watchdog(
            HeartbeatFolder(job.folder / HEARTBEATS, number),
            self.activity,
            job.grid.coords(number),
            timeout=TIMEOUT,
            end_job=lambda code: job.left.append((number, code)),
            clock=job.clock,
            reworded=reworded,
        )

    def second(self) -> None:
        if self.does == "works":
            with self.phases("compute"):
                pass
        elif self.does == "waits":
            with self.phases("p2p"):
                self.backoff.pause()
        if self.does != "is stopped":
            self.dog.look()


class Job:
    def __init__(self, folder: Path, *, g_inter: int = 3, g_data: int = 1) -> None:
        self.folder = folder
        self.grid = Grid(g_inter, g_data)
        self.clock = Clock()
        self.left: list[tuple[int, int]] = []
        HeartbeatFolder(folder / HEARTBEATS, 0).clear()
        self.ranks = [Rank(self, number) for number in range(self.grid.size)]

    def do(self, *what: str) -> None:
        for rank, does in zip(self.ranks, what, strict=True):
            rank.does = does

    def run(self, seconds: int) -> int:
        """Let time pass until a rank ends the job; returns how many seconds passed."""
        for second in range(seconds):
            if self.left:
                return second
            self.clock.now += 1
            for rank in self.ranks:
                rank.second()
        return seconds

    @property
    def report(self) -> str:
        return (self.folder / REPORT_FILE).read_text()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    played = Job(tmp_path)
    played.run(3)
    return played


@pytest.fixture(autouse=True)
def timers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """A stand-in for the timers that would end this process."""
    begun: list[tuple[float, int]] = []

    class Timer:
        def __init__(self, seconds: float, _: object, arguments: tuple[int]) -> None:
            self.begins = (seconds, *arguments)

        def start(self) -> None:
            begun.append(self.begins)

    monkeypatch.setattr(threading, "Timer", Timer)
    return begun


def test_a_run_is_left_alone_as_long_as_any_rank_gets_on(job: Job) -> None:
    job.do("waits", "waits", "works")

    assert job.run(200) == 200


@pytest.mark.parametrize("others", ["waits", "hangs"])
def test_what_one_rank_does_now_and_then_counts_as_progress(job: Job, others: str) -> None:
    job.do("waits", "waits", others)

    for _ in range(6):
        job.run(18)
        job.ranks[2].activity.note_progress()  # also of a thread that writes

    assert job.left == []


def test_a_rank_that_hangs_is_named_with_its_phase_and_the_job_ends_with_70(
    job: Job, capsys: pytest.CaptureFixture[str], timers: list[tuple[float, int]]
) -> None:
    job.ranks[0].awaited = ["gradient 2 from rank 1"]
    job.ranks[1].phases.action = "B2"
    job.do("waits", "hangs", "waits")

    with job.ranks[1].phases("compute"):
        seconds = job.run(100)

    assert [code for _, code in job.left] == [70]
    assert TIMEOUT < seconds < 1.5 * TIMEOUT
    assert timers == [(10.0, 70)], "MPI may be what hangs"
    *_, line = capsys.readouterr().err.splitlines()
    assert line == (
        "axsparse: error: rank 1 (stage 1, replica 0): hangs in compute (B2) of step 7, no "
        "progress for 20 s; rank 0 awaits its gradient 2 in step 7; the stacks of all ranks are "
        f"in {job.folder / REPORT_FILE}; the same command goes on, and a "
        "larger watchdog.timeout waits longer"
    )
    assert job.report.splitlines()[0] in line


STOPPED = "(stage {0}, replica 0): hangs, last seen in "


@pytest.mark.parametrize(
    ("does", "texts"),
    [
        (["is stopped", "waits", "waits"], ["rank 0 " + STOPPED.format(0), "Python does not run"]),
        (["waits", "is stopped", "waits"], ["rank 1 " + STOPPED.format(1), "Python does not run"]),
        (
            ["waits", "waits", "waits"],
            ["rank 1 (stage 1, replica 0): hangs in other of step 7", ", and so do all others, w"],
        ),
    ],
    ids=["the first is stopped", "the second is stopped", "all wait"],
)
def test_a_rank_that_others_wait_for_is_named_by_one_that_runs(
    does: list[str], texts: list[str], job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.do("works", "waits", "works")
    job.run(4)
    job.do(*does)

    assert job.run(100) < 1.5 * TIMEOUT
    assert [code for _, code in job.left] == [70]
    *_, line = capsys.readouterr().err.splitlines()
    assert all(text in line for text in texts), line
    assert "is stopped" not in does or "no stacks: it did" in job.report


def test_if_the_one_that_reports_is_stopped_the_others_end_the_job(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.do("waits", "hangs", "waits")
    (job.folder / HEARTBEATS / "hang").touch()  # by a rank that is stopped since then

    assert 2 * TIMEOUT <= job.run(100) < 2.5 * TIMEOUT
    assert "hangs in other of step 7, and no rank reports it" in capsys.readouterr().err


def test_until_the_first_step_is_done_patience_is_longer(job: Job) -> None:
    for rank in job.ranks:
        rank.activity.steps = 0
    job.do("waits", "waits", "hangs")

    assert job.run(int(4.9 * TIMEOUT)) == int(4.9 * TIMEOUT)
    assert job.run(100) < TIMEOUT


def test_a_report_that_cannot_be_written_is_printed_as_a_whole(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    (job.folder / REPORT_FILE).mkdir()
    job.do("waits", "hangs", "waits")

    job.run(100)

    said = capsys.readouterr().err
    assert said.count("thread MainThread:") == 3
    assert said.count("hangs in") == 1


def test_a_disk_that_fails_for_a_while_ends_nothing(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: HeartbeatFolder, heartbeat: Heartbeat, stacks: str) -> None:
        raise OSError

    with monkeypatch.context() as failing:
        failing.setattr(HeartbeatFolder, "write", fail)
        job.run(50)
    job.do("waits", "waits", "works")

    assert job.run(100) == 100


def test_a_disk_that_hangs_with_training_ends_the_job(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    rank = job.ranks[1]
    looks = int(2 * TIMEOUT)

    for _ in range(looks):
        rank.dog.check_looks()
    rank.activity.note_progress()
    for _ in range(looks):
        rank.dog.check_looks()
    rank.dog.look()
    for _ in range(looks):
        rank.dog.check_looks()
    assert job.left == [], "either training or its disk got on"
    rank.dog.check_looks()

    assert job.left == [(1, 70)]
    assert capsys.readouterr().err == (
        "axsparse: error: rank 1 (stage 1, replica 0): hangs, and so does the disk of "
        f"{job.folder}, where it would be reported; the same command goes on\n"
    )


def test_its_line_names_the_options_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, config = job_alone(), tiny_config(run_dir=str(tmp_path / "run"))
    job.reworded = reworded
    trainer = build(job, tiny_gpt(config), lambda: Datasets(token_data()), config)
    dog = trainer._watchdog
    assert dog is not None
    dog.end_job = bool
    dog._end(f"hangs; {RESUME_AUTO} goes on")
    trainer.close()

    assert capsys.readouterr().err == "axsparse: error: hangs; the same command goes on\n"


def test_a_rank_by_itself_is_watched_also_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> bool:
        raise OSError

    job = Job(tmp_path, g_inter=1)
    job.run(3)
    job.do("hangs")
    monkeypatch.setattr(HeartbeatFolder, "claim", fail)
    monkeypatch.setattr(HeartbeatFolder, "write", fail)

    assert job.run(100) < 1.5 * TIMEOUT

    assert job.left[0][1] == 70
    assert "error: rank 0 (stage 0, replica 0): hangs in other of step 7" in capsys.readouterr().err


def test_its_thread_looks_and_ends_and_the_last_rank_takes_the_folder_away(tmp_path: Path) -> None:
    others = {*threading.enumerate()}  # which other tests may have left
    job = Job(tmp_path, g_inter=2)
    first, second = (rank.dog for rank in job.ranks)
    first.interval = 1e-3
    second.start()
    first.start()
    first.close()
    first.start()
    heartbeats = HeartbeatFolder(tmp_path / HEARTBEATS, 1)

    while heartbeats.read(0) is None:
        threading.Event().wait(1e-3)
    first.close()
    first.close()
    assert (tmp_path / HEARTBEATS).is_dir()
    second.close()

    assert not any(each.name.startswith(THREAD) for each in {*threading.enumerate()} - others)
    assert not (tmp_path / HEARTBEATS).exists()


def test_of_the_folder_nothing_is_deleted_but_what_watchdogs_wrote(tmp_path: Path) -> None:
    folder = tmp_path / HEARTBEATS
    folder.mkdir()
    for name in ("notes.txt", "rank-0.json", "rank-11.json", "hang"):
        (folder / name).touch()

    HeartbeatFolder(folder, 0).clear()

    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


# -- what a rank is doing -------------------------------------------------------------------


def test_training_says_what_it_is_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(
        train={"steps": 2, "eval_every": 2, "eval_steps": 1},
        checkpoint={"every": 2},
        pruning={"at_step": 1},
    )
    said: list[tuple[Task, int]] = []
    at = Activity.at

    def note(self: Activity, task: Task, step: int) -> None:
        said.append((task, step))
        at(self, task, step)

    monkeypatch.setattr(Activity, "at", note)
    trainers: list[Trainer] = []

    ran((1, 1), config, tmp_path, validation=token_data(), look=trainers.append)

    assert said == [
        ("masks", 0),
        ("training", 1),
        ("masks", 1),
        ("training", 2),
        ("evaluation", 2),
        ("checkpoint", 2),
        ("checkpoint", 2),
    ]
    assert trainers[0].activity.steps == 2


def test_what_has_come_is_awaited_no_more() -> None:
    heard: list[list[str]] = []
    engines: list[Engine] = []

    def listen(trainer: Trainer) -> None:
        if trainer.coords.rank == 0:
            engine, link = trainer.engine, trainer.link
            engines.append(engine)
            arrivals = link.arrivals

            def look() -> list[Message]:
                heard.append(engine.awaited())
                return arrivals()

            vars(link)["arrivals"] = look

    config = tiny_config(train={"steps": 1}, batch={"global_batch_size": 8})
    train_in_process(2, 1, tiny_gpt(config), config, token_data(), before=listen)

    awaited = [text for (text,) in filter(None, heard)]
    assert awaited == sorted(awaited)
    assert awaited[0] == "gradient 0 from rank 1" != awaited[-1]
    assert engines[0].awaited() == []
