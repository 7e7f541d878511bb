"""Commands of axsparse in this process, and the lines by which axsparse refuses what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from axsparse.__main__ import main
from axsparse.runtime.errors import AxsparseError

Axsparse = Callable[..., tuple[int, str, str]]


@pytest.fixture
def axsparse(capsys: pytest.CaptureFixture[str]) -> Axsparse:
    """`axsparse("plan", "--gpus", 4)`: exit code, screen and errors of that command line."""

    def run(*words: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(word) for word in words])
        said = capsys.readouterr()
        return int(end.value.code or 0), said.out, said.err

    return run


def assert_one_line(said: tuple[int, str, str], code: int, text: str) -> None:
    """Whether a command was refused with this exit code, in one line that has this text."""
    ended, screen, errors = said
    assert (ended, screen) == (code, "")
    assert errors.startswith("axsparse: error: ") and errors.count("\n") == 1
    assert text in errors


def cases_in(file: Path) -> list[list[str]]:
    """The cases of a table, and the line of each."""
    text = file.read_text(encoding="utf-8")
    return [case.removeprefix("$ ").rstrip("\n").split("\n") for case in text.split("\n\n")]


def lines_beside(test_file: str) -> dict[str, str]:
    return {case[0]: case[1] for case in cases_in(Path(test_file).with_suffix(".txt"))}


def refusal(rejected: Callable[[], object], kind: type[AxsparseError], place: object = None) -> str:
    """The line that a call is refused with; `place`, such as a path, is left out of it."""
    with pytest.raises(kind) as told:
        rejected()
    said = str(told.value)
    return said if place is None else said.replace(str(place), "PLACE")
