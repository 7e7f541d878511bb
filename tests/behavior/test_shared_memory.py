"""A job that fails, or is left at once, leaves no shared memory of its own on the host."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.mpirun import run_mpirun

from axsparse.runtime.shared_segments import SHARED

SEGMENTS_OF_THIS_PROCESS = """
from pathlib import Path
from axsparse.runtime.shared_segments import SEGMENTS

for line in Path("/proc/self/maps").read_text().splitlines():
    path = Path(line.split(maxsplit=5)[-1])
    if SEGMENTS.match(path.name):
        print("maps", path, flush=True)
"""

pytestmark = pytest.mark.skipif(not SHARED.is_dir(), reason="this system has no /dev/shm")


@pytest.fixture
def segment() -> Iterator[Path]:
    """A file named as NCCL names its own, which nobody else has."""
    path = SHARED / f"nccl-axsparse-{uuid.uuid4().hex}"
    path.write_bytes(bytes(mmap.PAGESIZE))
    yield path
    path.unlink(missing_ok=True)


def segments_told(output: str) -> list[Path]:
    return [Path(line.split()[1]) for line in output.splitlines() if line.startswith("maps ")]


def test_a_job_that_ends_all_ranks_removes_what_its_ranks_map() -> None:
    program = f"""
import sys
from axsparse.runtime.connection import connect
transport = connect()
{SEGMENTS_OF_THIS_PROCESS}
transport.abort(3)
"""
    job = run_mpirun(2, ["-c", program])
    segments = segments_told(job.stdout)
    assert job.returncode == 3, str(job)
    assert segments, str(job)
    assert [path for path in segments if path.exists()] == [], str(job)


def test_a_second_signal_removes_what_the_process_maps(segment: Path) -> None:
    program = f"""
import mmap, signal, time
from axsparse.runtime.stop_signal import StopRequest
with open({str(segment)!r}, "r+b") as file:
    mapped = mmap.mmap(file.fileno(), 0)
request = StopRequest()
request.echo_seconds = 0.0
request.listen()
{SEGMENTS_OF_THIS_PROCESS}
time.sleep(300)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert segments_told(process.stdout.readline()) == [segment]
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.05)
    assert process.returncode == 128 + signal.SIGTERM
    assert not segment.exists()
