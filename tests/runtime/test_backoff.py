"""How long a rank sleeps between polls."""

from __future__ import annotations

import time

import pytest

from axsparse.runtime.backoff import SleepingBackoff


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


def test_another_wait_begins_with_the_shortest_pause(slept: list[float]) -> None:
    backoff = SleepingBackoff(shares_core=True)

    for _ in range(4):
        backoff.pause()
    backoff.reset()
    backoff.pause()

    assert slept[-1] == 50e-6
    assert backoff.pauses == 5
