"""Work in a thread of its own."""

from __future__ import annotations

import threading

import pytest

from axsparse.training.checkpoint.background_work import BackgroundWork


def test_it_is_busy_until_the_work_is_done() -> None:
    may_end = threading.Event()
    work = BackgroundWork(lambda: may_end.wait(60), "test")

    assert work.is_busy
    may_end.set()

    assert work.result() is True
    assert not work.is_busy


@pytest.mark.parametrize("failure", [OSError("full"), KeyboardInterrupt()])
def test_whoever_asks_for_the_result_hears_of_the_failure(failure: BaseException) -> None:
    def fail() -> None:
        raise failure

    work = BackgroundWork(fail, "test")
    work.wait()

    with pytest.raises(type(failure)):
        work.result()
