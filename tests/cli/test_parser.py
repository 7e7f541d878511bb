"""The one wrapper around the work of a command: exit codes, lines, and the rank that speaks."""

from __future__ import annotations

import pytest

from axsparse.cli.parser import run_command
from axsparse.runtime.errors import MissingInputError


def missing() -> None:
    raise MissingInputError("a.yaml: no such file; name an existing one")


def interrupt() -> None:
    raise KeyboardInterrupt


def test_work_that_returns_ends_the_process_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(lambda: print("done"))

    assert end.value.code == 0
    assert capsys.readouterr() == ("done\n", "")


def test_an_error_is_one_line_and_its_own_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(missing)

    assert end.value.code == 66
    assert capsys.readouterr().err == (
        "axsparse: error: a.yaml: no such file; name an existing one\n"
    )


@pytest.mark.parametrize(
    ("words", "line"), [(None, ""), ("start it again", "axsparse: error: start it again\n")]
)
def test_an_interrupt_ends_with_130(
    capsys: pytest.CaptureFixture[str], words: str | None, line: str
) -> None:
    with pytest.raises(SystemExit) as end:
        run_command(interrupt, interrupted=words)

    assert end.value.code == 130
    assert capsys.readouterr().err == line


def test_other_ranks_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")

    with pytest.raises(SystemExit) as end:
        run_command(missing)

    assert end.value.code == 0


def test_an_error_of_the_program_itself_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: print(1 / 0))
