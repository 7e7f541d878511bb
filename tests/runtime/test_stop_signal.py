"""Signals that ask a run to stop."""

from __future__ import annotations

import asyncio
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
from typing import Any

import pytest

from axsparse.runtime.shared_segments import SHARED
from axsparse.runtime.stop_signal import SIGNALS, StopRequest


@pytest.fixture
def stop() -> Iterator[StopRequest]:
    left = threading.Event()
    request = StopRequest(lambda code: left.set())
    vars(request)["left"] = left
    before = {number: signal.signal(number, signal.SIG_DFL) for number in SIGNALS}
    yield request
    request.release()
    for number, handler in before.items():
        signal.signal(number, handler)


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
    before = [*map(signal.getsignal, SIGNALS)]
    signal.set_wakeup_fd(-1)  # as a trainer of another test may have left it, which still listens

    stop.listen()
    assert [*map(signal.getsignal, SIGNALS)] != before
    stop.release()

    assert [*map(signal.getsignal, SIGNALS)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not vars(stop)["_thread"].is_alive()
    stop.release()


def test_while_nothing_is_under_way_the_program_has_its_signals_and_none_is_lost(
    stop: StopRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each comes to one handler, even if the thread that reads sees it when the next one is set."""
    stop.idle = (signal.SIGINT,)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stop.listen()
    stop.rest()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not stop.is_set

    stop.listen()
    signal.raise_signal(signal.SIGINT)
    stop.rest()

    assert stop.reason == "SIGINT"
    assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert not vars(stop)["left"].is_set()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop.listen()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "the program's own since"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    stop.release()
    capsys.readouterr()
    stop.listen()
    stop.idle = ()
    stop.rest()
    stop.receive(signal.SIGINT)
    assert capsys.readouterr().err == (
        "axsparse: stops at the next step or the end of the program and saves; Ctrl-C once more "
        "leaves at once\n"
    )


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
        "import ctypes; from axsparse.runtime.stop_signal import StopRequest\n"
        "stop = StopRequest(); stop.echo_seconds = 0.0\n"
        "stop.listen(); print('ready', flush=True)\n"
        "mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)\n"
        # The second call waits for ever, whatever signals come.
        "library.pthread_mutex_lock(mutex); library.pthread_mutex_lock(mutex)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", waiting], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
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


def test_asyncio_leaves_ctrl_c_to_a_run(stop: StopRequest) -> None:
    async def train() -> None:
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        stop.listen()
        assert getattr(signal.getsignal(signal.SIGINT), "__self__", None) is stop
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(stop)
        stop.release()

    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # in place of which asyncio has its own
    asyncio.run(train())
    assert stop.reason == "SIGINT"


@pytest.mark.parametrize(
    ("number", "handler"),
    [
        (signal.SIGTERM, lambda *_: None),
        (signal.SIGHUP, signal.SIG_IGN),  # as nohup ignores it
        (signal.SIGINT, lambda *_: None),
        (signal.SIGINT, signal.SIG_IGN),  # as a script ignores it for its jobs in the background
    ],
)
def test_signals_with_a_handler_of_the_program_stay_its_own(
    number: signal.Signals, handler: Any, stop: StopRequest
) -> None:
    signal.signal(number, handler)

    stop.listen()
    assert signal.getsignal(number) is handler
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
    signal.signal(signal.SIGUSR1, handler)  # in the middle of the run
    last = signal.SIGTERM if number == signal.SIGINT else signal.SIGINT
    for one in (number, signal.SIGUSR1, last):
        os.kill(os.getpid(), one)
    wait_for(stop)
    assert stop.reason == last.name
    stop.release()
    assert signal.getsignal(number) is handler
    assert signal.getsignal(signal.SIGUSR1) is handler


def test_a_command_leaves_ctrl_c_ignored_where_its_starter_ignores_it() -> None:
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from axsparse.runtime.job import run\n"
        "run(lambda job: print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN))"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.stdout == "True\n", done.stderr


def test_a_loop_of_asyncio_has_its_signals_while_a_run_listens_and_after_it(
    stop: StopRequest,
) -> None:
    async def main() -> list[str]:
        heard: list[str] = []
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, heard.append, "SIGTERM")
        for change in (stop.listen, stop.rest, stop.release):
            change()
            os.kill(os.getpid(), signal.SIGTERM)
            before = len(heard)
            for _ in range(100):
                if len(heard) == before:
                    await asyncio.sleep(0.02)
        return heard

    assert asyncio.run(main()) == ["SIGTERM"] * 3
    assert not stop.is_set


@pytest.mark.parametrize("end", ["closed", "another file's"])
def test_a_descriptor_that_was_closed_meanwhile_gets_no_signals(
    end: str, stop: StopRequest
) -> None:
    (reader, writer), (others_reader, other) = (os.pipe2(os.O_NONBLOCK) for _ in range(2))
    signal.set_wakeup_fd(writer)
    stop.listen()
    if end == "closed":
        os.close(writer)
    else:
        os.dup2(other, writer)

    stop.release()

    assert signal.set_wakeup_fd(-1) == -1
    for number in (reader, others_reader, other, *([] if end == "closed" else [writer])):
        os.close(number)


def test_a_descriptor_that_the_program_sets_while_a_run_listens_stays(stop: StopRequest) -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    stop.listen()
    signal.set_wakeup_fd(writer)

    stop.release()

    assert signal.set_wakeup_fd(-1) == writer
    os.close(reader)
    os.close(writer)


def test_a_run_takes_the_signals_of_one_that_was_left_open(stop: StopRequest) -> None:
    other = StopRequest()
    other.listen()
    stop.listen()

    os.kill(os.getpid(), signal.SIGTERM)

    wait_for(stop)
    assert not other.is_set
    stop.release()
    other.release()
