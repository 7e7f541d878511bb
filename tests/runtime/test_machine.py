"""Memory of this process and its machine."""

from __future__ import annotations

import os
import platform
import resource
import time
from pathlib import Path

import pytest
from support.mpirun import run_fresh

from axsparse.runtime.machine import (
    CoreShare,
    SleepingBackoff,
    host_memory_bytes,
    own_share,
    peak_memory_bytes,
    resident_memory_bytes,
    share_cores,
)

OF_A_PROCESS = """
import os, resource
from mmap import mmap
import torch
from axsparse.runtime.machine import (
    HeapTrimmer, give_back_at_once, keep_freed_blocks, peak_memory_bytes, resident_memory_bytes
)

def pages_taken(of_turns):
    # A hundred megabytes in blocks of two megabytes, again and again.
    def turn():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        held = [torch.ones(500_000) for _ in range(50)]
        del held
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    turn()
    return of_turns([turn() for _ in range(5)])

# Kept memory is used again before any is mapped, so that giving back comes first. Where memory is
# short the system itself takes kept pages in some of the turns.
print(give_back_at_once(), pages_taken(max), keep_freed_blocks(), pages_taken(min))
for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"):
    os.environ[name] = "1048576"
    print(keep_freed_blocks(), give_back_at_once())
    del os.environ[name]

before = resident_memory_bytes()
with mmap(-1, 50_000_000) as held:
    for _ in range(500):
        held.write(b"x" * 100_000)
    print(resident_memory_bytes() - before, peak_memory_bytes() - before)
print(resident_memory_bytes() - before)

# Of four blocks of a megabyte three are freed, which lie between the ones that stay.
trimmer, stay = HeapTrimmer(), []
trimmer.trim()
for count in (200, 600):
    blocks = [torch.ones(250_000) for _ in range(count)]
    stay += blocks[::4]
    del blocks
    before = resident_memory_bytes()
    trimmer.trim()
    print(before - resident_memory_bytes())
"""
"""In a separate process: one that has run tests gives memory back in between."""


@pytest.fixture(scope="module")
def told() -> list[str]:
    done = run_fresh("-c", OF_A_PROCESS)
    assert done.returncode == 0, str(done)
    return done.stdout.split()


def test_resident_memory_is_what_is_held_now_and_the_peak_stays(told: list[str]) -> None:
    held, peak, after = map(int, told[8:11])
    assert held == pytest.approx(50e6, rel=0.1)
    assert peak > 0.9 * held
    assert after < 10e6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries cannot be told")
def test_freed_blocks_are_kept_until_they_have_to_be_given_back(told: list[str]) -> None:
    can_give_back, given_back, can_keep, kept = told[:4]

    assert (can_give_back, can_keep) == ("True", "True")
    assert int(kept) < 500 < 20_000 < int(given_back)
    assert told[4:8] == ["False"] * 4, "what the user sets in the environment stays"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries cannot be told")
def test_holes_between_blocks_are_given_back_once_they_may_be_large(told: list[str]) -> None:
    few, many = map(int, told[11:])

    # Of 150 MB; the system maps and takes single pages meanwhile.
    assert abs(few) < 1e6
    assert many == pytest.approx(450e6, rel=0.3)


def test_the_peak_stands_in_where_the_system_does_not_say(tmp_path: Path) -> None:
    assert resident_memory_bytes(tmp_path / "none") == peak_memory_bytes()


def test_a_process_has_no_more_than_its_own_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: {resource.RLIMIT_AS: (10**8, -1)}[kind])
    assert host_memory_bytes(tmp_path) == 10**8


def test_a_container_has_what_its_cgroup_leaves(tmp_path: Path) -> None:
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_memory_bytes(tmp_path) == whole
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory_bytes(tmp_path) == whole
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1000000\n")
    assert host_memory_bytes(tmp_path) == 1_000_000
    (tmp_path / "memory.max").write_text("500000\n")
    assert host_memory_bytes(tmp_path) == 500_000


@pytest.mark.parametrize(
    ("own", "limited", "expected"),
    [
        ("0::/job/step/task", "job/step/memory.max", 400_000),
        ("0::/job", "job/step/memory.max", None),
        ("0::/../job", "job/memory.max", None),
        ("4:memory:/job\n0::/", "memory/job/memory.limit_in_bytes", 400_000),
        ("4:cpu,memory:/a:b", "memory/a:b/memory.limit_in_bytes", 400_000),
        ("5:cpuset:/job", "memory/job/memory.limit_in_bytes", None),
    ],
)
def test_a_job_has_what_its_own_groups_leave(
    own: str, limited: str, expected: int | None, tmp_path: Path
) -> None:
    """Schedulers and systemd set limits on groups below the root."""
    listed, file = tmp_path / "own", tmp_path / limited
    listed.write_text(f"{own}\n")
    file.parent.mkdir(parents=True)
    file.write_text("400000\n")

    assert host_memory_bytes(tmp_path, listed) == (expected or host_memory_bytes(tmp_path))


@pytest.mark.parametrize(
    ("shares_core", "pauses", "sleeps"),
    [(False, 42, [50e-6] * 20 + [200e-6] * 2), (True, 5, [50e-6, 100e-6, 200e-6, 500e-6, 500e-6])],
)
def test_a_rank_polls_before_it_sleeps_unless_it_shares_its_core(
    shares_core: bool, pauses: int, sleeps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    backoff = SleepingBackoff(shares_core=shares_core)

    for _ in range(pauses):
        backoff.pause()

    assert slept == sleeps


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([CoreShare(frozenset({0, 1}))] * 2, False),
        ([CoreShare(frozenset({0, 1}))] * 3, True),
        # Each rank is bound to a core of its own.
        ([CoreShare(frozenset({number})) for number in range(4)], False),
        # Two are bound to one core.
        ([CoreShare(frozenset({number // 2})) for number in range(4)], True),
        ([CoreShare(frozenset(range(64)), quota=4.0)] * 4, False),
        ([CoreShare(frozenset(range(64)), quota=3.5)] * 4, True),
    ],
)
def test_ranks_share_cores_if_they_are_more(shares: list[CoreShare], expected: bool) -> None:
    assert share_cores(shares) is expected


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
    ],
)
def test_a_container_may_use_what_its_cgroup_leaves(
    files: dict[str, str], quota: float | None, tmp_path: Path
) -> None:
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    assert own_share(tmp_path).quota == quota


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="Linux alone binds to cores")
def test_a_process_may_use_the_cores_that_it_is_bound_to(tmp_path: Path) -> None:
    assert own_share(tmp_path).cores == os.sched_getaffinity(0)
