"""Processes that decode images."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from multiprocessing import Pipe
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from PIL import Image

from axsparse.data.images.augmentation import View, render
from axsparse.data.images.decoders import Workers, serve
from axsparse.runtime.errors import DataError, TrainingError

PATIENCE = 60
"""Seconds after which a test gives up on a hanging call; passing tests take far less."""


@pytest.fixture(autouse=True)
def _no_test_hangs_and_no_thread_is_left() -> Iterator[None]:
    def give_up(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still waiting after {PATIENCE} seconds")

    before = set(threading.enumerate())
    previous = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(PATIENCE)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)
    assert set(threading.enumerate()) == before


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The worker processes that are started during a test."""
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            started.append(self)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    return started


def image(folder: Path, number: int = 0) -> str:
    path = folder / f"{number}.png"
    Image.new("RGB", (12, 10), (number, 100, 200)).save(path)
    return str(path)


def answers(workers: Workers, views: list[View]) -> list[bytes]:
    waiting: list[Callable[[], bytes]] = [workers.start(view) for view in views]
    return [wait() for wait in waiting]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_any_number_of_workers_gives_the_same_pixels_in_the_order_asked_for(
    count: int, tmp_path: Path
) -> None:
    views = [View(image(tmp_path, n), 6, None if n % 2 else (1, 2, n)) for n in range(20)]
    workers = Workers(count)

    assert answers(workers, views) == [render(view) for view in views]
    workers.close()


def test_no_process_is_started_before_a_view_is_asked_for(
    processes: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    workers = Workers(2)
    assert processes == []

    answers(workers, [View(image(tmp_path), 6, None)])
    workers.close()

    assert len(processes) == 2
    assert all(process.returncode is not None for process in processes)


def test_without_workers_no_process_is_started(
    processes: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    answers(Workers(0), [View(image(tmp_path), 6, None)])

    assert processes == []


def test_closed_workers_come_back_when_they_are_needed(tmp_path: Path) -> None:
    workers = Workers(1)
    view = View(image(tmp_path), 6, None)
    workers.close()
    workers.close()

    for _ in range(2):
        assert answers(workers, [view]) == [render(view)]
        workers.close()


def test_closing_ends_what_still_waits(tmp_path: Path) -> None:
    fifo = tmp_path / "pipe.png"
    os.mkfifo(fifo)
    workers = Workers(1)
    stuck = workers.start(View(str(fifo), 6, None))
    behind = workers.start(View(image(tmp_path), 6, None))
    with fifo.open("wb"):  # which waits for the worker
        workers.close()

    with pytest.raises(TrainingError, match=r"was ended by SIGKILL"):
        stuck()
    with pytest.raises(CancelledError):
        behind()


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("content", [b"", b"no image", b"cut"])
def test_a_broken_image_is_named_and_harms_no_other(
    content: bytes, count: int, tmp_path: Path
) -> None:
    good = View(image(tmp_path), 6, None)
    broken = tmp_path / "broken.jpeg"
    if content == b"cut":
        Image.effect_noise((64, 64), 50).save(broken)
        content = broken.read_bytes()[:-400]
    broken.write_bytes(content)
    workers = Workers(count)

    first, second, third = map(workers.start, (good, View(str(broken), 6, None), good))

    assert first() == third() == render(good)
    with pytest.raises(
        DataError,
        match=r"/broken\.jpeg: not an image that can be read \(\w+: .+\); "
        r"repair it, or take it out of the folder on all hosts",
    ):
        second()
    workers.close()


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("name", ["gone.png", "gone_\udcff.png"])  # a byte that is no UTF-8
def test_a_file_that_went_away_is_named(name: str, count: int, tmp_path: Path) -> None:
    workers = Workers(count)
    wait = workers.start(View(str(tmp_path / name), 6, None))

    with pytest.raises(DataError, match=r"/gone.*\.png: not an image .*No such file"):
        wait()
    workers.close()


def test_a_worker_that_is_killed_is_told_of_at_the_image_it_had(
    processes: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    fifo = tmp_path / "pipe.png"
    os.mkfifo(fifo)
    workers = Workers(1)
    wait = workers.start(View(str(fifo), 6, None))
    later = workers.start(View(image(tmp_path), 6, None))

    with fifo.open("wb"):  # which waits for the worker
        processes[0].kill()
        processes[0].wait()

    with pytest.raises(
        TrainingError,
        match=r"data\.workers: the process that decoded .*/pipe\.png was ended by SIGKILL; set "
        r"data\.workers to 0 to see why, or lower it if memory ran out",
    ):
        wait()
    with pytest.raises(TrainingError, match=r"/0\.png was ended by SIGKILL"):
        later()
    workers.close()


def test_a_worker_that_cannot_start_says_with_which_code_it_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    workers = Workers(1)
    wait = workers.start(View(image(tmp_path), 6, None))

    with pytest.raises(TrainingError, match="left with code 1"):
        wait()
    workers.close()


def test_a_worker_leaves_when_its_rank_does(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from axsparse.data.images.augmentation import View\n"
        "from axsparse.data.images.decoders import Workers\n"
        "Workers(1).start(View(sys.argv[1], 6, None))()\n"
        "os._exit(3)"  # as after a failure: nothing is tidied up
    )
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "wb") as stderr:
        done = subprocess.run([sys.executable, "-c", code, image(tmp_path)], stderr=stderr)

    assert done.returncode == 3
    with os.fdopen(ours, "rb") as stream:
        # The stream ends once no process holds its other end; the worker is one of these.
        assert stream.read() == b""


def test_a_worker_loads_neither_torch_nor_mpi() -> None:
    code = (
        "import sys, axsparse.data.images.decoders\n"
        "from axsparse.data.images.augmentation import View, render\n"
        "try: render(View('nothing', 1, None))\n"
        "except OSError: pass\n"
        "assert 'PIL' in sys.modules\n"
        "assert not {'torch', 'mpi4py', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_worker_answers_until_the_stream_ends(tmp_path: Path) -> None:
    ours, theirs = Pipe()
    views = [View(image(tmp_path), 4, None), View("nothing.png", 4, None)]
    for view in views:
        ours.send(view)
    thread = threading.Thread(target=serve, args=(theirs,))
    thread.start()

    pixels, reason = ours.recv_bytes(), ours.recv_bytes()
    ours.close()
    thread.join()

    assert pixels == b"\0" + render(views[0])
    assert reason.startswith(b"\1FileNotFoundError: ")
    theirs.close()
