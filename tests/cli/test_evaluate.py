"""How `axsparse evaluate` says how far it is; tests/training has what it finds."""

from __future__ import annotations

import pytest

from axsparse.cli.evaluate import EVERY_SECONDS, _progress


def test_a_long_evaluation_says_every_few_seconds_how_far_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds = iter([0.0, 1.0, EVERY_SECONDS + 1, EVERY_SECONDS + 1, EVERY_SECONDS + 2, 99.0])
    after_batch = _progress(lambda: next(seconds))
    for done in range(1, 5):
        after_batch(done, 4)

    assert capsys.readouterr().err == "evaluated 2 of 4 batches\n"
