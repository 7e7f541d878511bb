"""The one way out of the process."""

from __future__ import annotations

import ast
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.page_blocks import sources

from axsparse.runtime.process import (
    SHARED,
    STARTING_SECONDS,
    StopRequest,
    leftovers,
    remove_leftovers,
    remove_own,
)

END = "import atexit, threading; from axsparse.runtime.process import exit_at_once, exit_process; "


def ended(code: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", END + code], capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("exit_process()", (0, "", "")),
        ("exit_process(75, 'saved')", (75, "", "axsparse: saved\n")),
        ("atexit.register(print, 'bye'); print('hi'); exit_process(3)", (3, "hi\nbye\n", "")),
        ("atexit.register(print, 'bye'); exit_at_once(3)", (3, "", "")),
        (
            "thread = threading.Thread(target=exit_process, args=(70, 'hung')); print('hi'); "
            "thread.start(); thread.join(); print('never')",
            (70, "hi\n", "axsparse: hung\n"),
        ),
    ],
)
def test_the_process_ends_with_its_code_and_last_line(code: str, end: tuple[int, str, str]) -> None:
    assert ended(code) == end


def test_a_reader_that_has_gone_is_no_mistake() -> None:
    command = f"{sys.executable} -c \"{END} print('x' * 99999); exit_process(5)\" | true"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, check=False
    )

    assert done.returncode in (1, 5)  # print itself may fail; the exit adds nothing
    assert b"Exception ignored" not in done.stderr


def test_there_is_no_other_way_out() -> None:
    others = {
        name
        for name, module in sources().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.exit", "os._exit")
    }

    assert others <= {"runtime.process"}


MAPPED = "mpich_shm_1"


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    for name in ("mpich_shm_1", "mpich_shm_2", "vader_segment.host.1", "somebody_elses"):
        (folder / name).write_bytes(b"x" * 4096)
    return folder


def process(folder: Path, *, maps: str = "", opened: Path | None = None) -> Path:
    """A /proc of one process."""
    (folder / "7" / "fd").mkdir(parents=True)
    (folder / "self").mkdir()
    (folder / "7" / "maps").write_text(maps)
    if opened is not None:
        (folder / "7" / "fd" / "3").symlink_to(opened)
    return folder


def test_what_no_process_holds_is_left_over(shared: Path, tmp_path: Path) -> None:
    # A name that begins alike holds nothing.
    maps = [f"7f00-7f01 rw-s 00000000 00:01 12 {shared}/{name}\n" for name in (MAPPED, "vader")]
    processes = process(tmp_path / "proc", maps="".join(maps), opened=shared / "mpich_shm_2")

    assert leftovers(shared, processes) == [str(shared / "vader_segment.host.1")]


def test_what_others_left_is_not_ours_to_judge(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert leftovers(tmp_path / "none", tmp_path / "none") == []
    monkeypatch.setattr(os, "getuid", lambda: 12345)

    assert leftovers(shared, process(tmp_path / "proc")) == []


def test_a_start_removes_what_is_left_over_and_was_not_made_just_now(
    shared: Path, tmp_path: Path
) -> None:
    maps = f"7f00-7f01 rw-s 00000000 00:01 12 {shared}/mpich_shm_1\n"
    long_ago = time.time() - STARTING_SECONDS - 1
    for path in (*shared.iterdir(), shared / "mpich_shm_3"):
        path.write_bytes(b"x")
        os.utime(path, (long_ago, long_ago))
    os.utime(shared / "mpich_shm_2")

    remove_leftovers(shared, process(tmp_path / "proc", maps=maps))

    assert {path.name for path in shared.iterdir()} == {
        *("mpich_shm_1", "mpich_shm_2", "somebody_elses"),
    }


def test_a_job_that_fails_removes_what_it_maps_itself(shared: Path, tmp_path: Path) -> None:
    processes = process(tmp_path / "proc")
    maps = [f"7f00-7f01 rw-s 00000000 00:01 12 {path}" for path in shared.iterdir()]
    maps = [line for line in maps if not line.endswith("mpich_shm_2")]
    elsewhere = tmp_path / "mpich_shm_1"
    elsewhere.touch()
    text = [
        *maps,
        f"7f00-7f01 rw-s 00000000 00:01 12 {elsewhere}",
        "7f00-7f01 rw-p 00000000 00:00 0",
    ]
    (processes / "self" / "maps").write_text("\n".join(text))

    remove_own(shared, processes)

    assert {path.name for path in shared.iterdir()} == {"mpich_shm_2", "somebody_elses"}
    assert elsewhere.exists()


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    left = threading.Event()
    request = StopRequest(lambda code: left.set())
    vars(request)["left"] = left
    yield request
    request.release()


def wait_for(request: StopRequest) -> None:
    while not request.is_set:
        os.sched_yield()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_is_noted(number: signal.Signals, stop: StopRequest) -> None:
    stop.listen()
    stop.listen()  # once is enough

    os.kill(os.getpid(), number)

    wait_for(stop)
    assert stop.reason == number.name
    assert not vars(stop)["left"].is_set()


def test_a_second_signal_leaves_at_once(
    stop: StopRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    stop.echo_seconds = 0.0
    stop.listen()
    os.kill(os.getpid(), signal.SIGUSR1)
    wait_for(stop)

    os.kill(os.getpid(), signal.SIGTERM)

    assert vars(stop)["left"].wait(60)
    assert capsys.readouterr().err == "axsparse: leaving at once, by a second SIGTERM\n"


def test_one_signal_that_several_pass_on_is_one_and_others_mean_nothing(stop: StopRequest) -> None:
    stop.receive(signal.SIGWINCH)
    assert not stop.is_set

    for _ in range(3):
        stop.receive(signal.SIGUSR1)

    assert stop.reason == "SIGUSR1"
    assert not vars(stop)["left"].is_set()


def test_ctrl_c_says_what_happens_and_once_more_leaves_at_once(
    stop: StopRequest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stop.receive(signal.SIGINT)
    stop.receive(signal.SIGINT)  # as the launcher passes it on
    assert not vars(stop)["left"].is_set()
    assert capsys.readouterr().err == (
        "axsparse: stops after the step under way and saves; Ctrl-C once more leaves at once\n"
    )

    now += 1
    stop.receive(signal.SIGINT)

    assert vars(stop)["left"].is_set()
    assert capsys.readouterr().err == "axsparse: leaving at once, by a second SIGINT\n"
    monkeypatch.setenv("PMI_RANK", "1")
    StopRequest().receive(signal.SIGINT)
    assert capsys.readouterr().err == "", "one of many ranks speaks"


def test_released_signals_are_whose_they_were(stop: StopRequest) -> None:
    before = [signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)]

    stop.listen()
    assert [signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)] != before
    stop.release()

    assert [signal.getsignal(signal.SIGUSR1), signal.getsignal(signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
    stop.release()


@pytest.fixture
def segment() -> Iterator[Path]:
    """A file named as NCCL names its own, which nobody else has."""
    path = SHARED / f"nccl-axsparse-{uuid.uuid4().hex}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.skipif(not SHARED.is_dir(), reason="this system has no /dev/shm")
def test_a_second_signal_ends_a_process_whose_main_thread_waits_in_c(segment: Path) -> None:
    """There Python runs no handler: the thread that reads the pipe has to. It removes the shared
    memory that the process maps, too."""
    waiting = (
        f"import mmap; file = open({str(segment)!r}, 'r+b'); memory = mmap.mmap(file.fileno(), 0)\n"
        "import ctypes; from axsparse.runtime.process import StopRequest\n"
        "stop = StopRequest(); stop.echo_seconds = 0.0\n"
        "stop.listen(); print('ready', flush=True)\n"
        "mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)\n"
        # The second call waits for ever, whatever signals come.
        "library.pthread_mutex_lock(mutex); library.pthread_mutex_lock(mutex)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", waiting],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "ready\n"

    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)

    assert process.wait(60) in (128 + signal.SIGTERM, 128 + signal.SIGUSR1)
    assert "leaving at once, by a second SIG" in process.stderr.read()
    assert not segment.exists()
    process.stdout.close()
    process.stderr.close()


def test_signals_with_a_handler_of_the_program_stay_its_own(stop: StopRequest) -> None:
    before = signal.signal(signal.SIGTERM, mine := lambda *_: None)
    try:
        stop.listen()
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
        stop.release()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_what_nohup_ignores_stays_ignored(stop: StopRequest) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop.listen()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        stop.release()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
