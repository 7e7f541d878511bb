"""What is said of settings that are refused: `refusals.txt` has each case and its line.

Settings of a case stand between bars. A text that changes on purpose is changed there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from axsparse.config.load import load_config
from axsparse.config.validate import check_config
from axsparse.runtime.errors import ConfigError

CASES = [
    case.removeprefix("$ ").rstrip("\n").split("\n")
    for case in (Path(__file__).parent / "refusals.txt").read_text(encoding="utf-8").split("\n\n")
]


@pytest.mark.parametrize(("settings", "line"), CASES, ids=[settings for settings, _ in CASES])
def test_settings_that_cannot_be_run_are_refused_in_one_line(settings: str, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(load_config(None, settings.split(" | ")))

    assert str(caught.value) == line
