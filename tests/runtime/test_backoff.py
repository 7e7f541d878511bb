"""How long a rank sleeps between polls, and when ranks of one machine share its cores."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from axsparse.runtime.backoff import SleepingBackoff
from axsparse.runtime.machine import CoreShare, own_share, share_cores


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    sleeps: list[float] = []
    monkeypatch.setattr(time, "sleep", sleeps.append)
    return sleeps


def test_a_rank_with_a_core_of_its_own_polls_before_it_sleeps(slept: list[float]) -> None:
    backoff = SleepingBackoff()

    for _ in range(42):
        backoff.pause()

    assert slept == [50e-6] * 20 + [200e-6] * 2


def test_a_rank_that_shares_its_core_gives_it_away_at_once(slept: list[float]) -> None:
    backoff = SleepingBackoff(shares_core=True)

    for _ in range(5):
        backoff.pause()

    assert slept == [50e-6, 100e-6, 200e-6, 500e-6, 500e-6]


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
