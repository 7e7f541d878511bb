"""What is said of settings that are refused: `refusals.txt` has each case and its line.

Settings of a case stand between bars. A text that changes on purpose is changed there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from axsparse.config.load import configure
from axsparse.config.validate import check_config
from axsparse.runtime.errors import ConfigError


def cases_in(file: str) -> list[list[str]]:
    """What is refused, and the line that is said of it."""
    text = (Path(__file__).parent / file).read_text(encoding="utf-8")
    return [case.removeprefix("$ ").rstrip("\n").split("\n") for case in text.split("\n\n")]


CASES = cases_in("refusals.txt")


@pytest.mark.parametrize(("settings", "line"), CASES, ids=[settings for settings, _ in CASES])
def test_settings_that_cannot_be_run_are_refused_in_one_line(settings: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(configure(None, settings.split(" | ")))

    assert str(caught.value) == line
