"""What is said of things that are refused: beside a test file stands a text with a line for each.

`test_survey.txt` has the cases of `test_survey.py`: a name after "$ ", and under it the line. A
message that changes on purpose is changed there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from axsparse.runtime.errors import AxsparseError


def lines_beside(test_file: str) -> dict[str, str]:
    """The line of each case, by its name."""
    text = Path(test_file).with_suffix(".txt").read_text(encoding="utf-8")
    return dict(case.removeprefix("$ ").rstrip("\n").split("\n", 1) for case in text.split("\n\n"))


def refusal(refused: Callable[[], object], kind: type[AxsparseError], place: object = None) -> str:
    """The line that a call is refused with; `place`, such as a path, is left out of it."""
    with pytest.raises(kind) as told:
        refused()
    said = str(told.value)
    return said if place is None else said.replace(str(place), "PLACE")
