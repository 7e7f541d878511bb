"""Mistakes and what is said of them: each `*.txt` is a table of settings or programs and lines.

    $ pruning.sparsity=1.0 | seed=2          settings of `--set`
    >>> ax.configure({"sed": 1})             a program, with the names of `programs.py`
    ! plan nothing.yaml --gpus 2             a command of axsparse; RUN is a run of four steps
    78 configure: …                          the exit code and the line; … stands for any text
    fix: sed => seed                         the change that it suggests, which ends the mistake
    nofix: only another file does            why no change of the row can do what it suggests

`pytest tests/errors --update-errors` writes the lines that have changed into the tables, whose
diff is then to be read.
"""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from errors import programs
from support.resuming import ran
from support.runs import tiny_config

from axsparse.__main__ import main
from axsparse.config.load import configure
from axsparse.config.validate import check_config
from axsparse.runtime.errors import AxsparseError

FOLDER = Path(__file__).parent
MARKS = ("$ ", ">>> ", "... ", "! ")


@dataclass(frozen=True)
class Row:
    """A mistake: what is done, how it ends, and a change after which it ends well."""

    table: Path
    text: str
    """As it stands in the table."""

    @property
    def source(self) -> list[str]:
        return [line for line in self.text.split("\n") if line.startswith(MARKS) or line == "..."]

    @property
    def line(self) -> str:
        return self.text.split("\n")[len(self.source)]

    @property
    def suggestion(self) -> str | None:
        """The last part of the line, whatever its numbers; None if there is one part."""
        _, found, last = self.line.rpartition("; ")
        return re.sub(r"\d+", "N", last) if found else None

    @property
    def is_renamed(self) -> bool:
        return "\nfix: " not in self.text

    @property
    def fix(self) -> tuple[str, str] | None:
        """The text to replace, and its replacement; of an unknown setting both are in the line."""
        last = self.text.split("\n")[-1]
        if last.startswith("fix: "):
            old, _, new = last.removeprefix("fix: ").partition(" => ")
            return old, new
        meant = re.fullmatch(r"78 (\S+) \(--set\): unknown key; did you mean (\S+)\?", self.line)
        return (f"{meant[1]}=", f"{meant[2]}=") if meant else None


def rows() -> list[Row]:
    found = []
    for table in sorted(FOLDER.glob("*.txt")):
        blocks = table.read_text(encoding="utf-8").rstrip("\n").split("\n\n")
        found += [Row(table, block) for block in blocks if block.startswith(MARKS)]
    return found


def ended(source: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The exit code and the line of a mistake; empty if there is none."""
    kind, _, rest = source[0].partition(" ")
    try:
        if kind == "$":
            check_config(configure(None, rest.split(" | ")))
        elif kind == "!":
            capsys.readouterr()
            main(shlex.split(rest))
        else:
            program = "\n".join(line[4:] for line in source)
            exec(program, programs.names())  # noqa: S102 - the table is ours
    except AxsparseError as error:
        said = f"{error.exit_code} {error}"
    except SystemExit as end:
        said = f"{end.code} {capsys.readouterr().err.removeprefix('axsparse: error: ').rstrip()}"
        said = "" if not end.code else said
    else:
        return ""
    assert "\n" not in said, said
    said = said.replace(str(folder), "HERE")
    return said.encode("utf-8", "backslashreplace").decode("utf-8")


def agrees(said: str, line: str) -> bool:
    return re.fullmatch(".*".join(map(re.escape, line.split("…"))), said) is not None


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of two steps."""
    path = tmp_path_factory.mktemp("saved") / "RUN"
    ran((1, 1), tiny_config(train={"steps": 4}, checkpoint={"every": 2}), path)
    return path


@pytest.mark.parametrize("row", rows(), ids=lambda row: f"{row.table.stem} {row.source[-1]}"[:99])
def test_a_mistake_ends_with_its_code_and_its_line(
    row: Row,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if "RUN" in row.source[0]:
        shutil.copytree(request.getfixturevalue("saved"), "RUN")

    said = ended(row.source, tmp_path, capsys)

    assert said, "there is no mistake any more"
    if request.config.getoption("--update-errors") and not agrees(said, row.line):
        new = row.text.replace(f"\n{row.line}", f"\n{said}", 1)
        text = row.table.read_text(encoding="utf-8")
        row.table.write_text(text.replace(row.text, new, 1), encoding="utf-8")
        return
    assert agrees(said, row.line), said
    if row.fix is not None:
        old, new = row.fix
        assert any(old in line for line in row.source), f"{old!r} is not in the row"
        corrected = [line.replace(old, new) for line in row.source]
        left = ended(corrected, tmp_path, capsys)
        # A key that was meant may want another value.
        assert not agrees(left, row.line) if row.is_renamed else left == ""


def test_each_suggestion_is_applied_by_a_row() -> None:
    applied = {row.suggestion for row in rows() if row.fix or "\nnofix: " in row.text}
    assert {row.suggestion for row in rows()} - applied <= {None}
