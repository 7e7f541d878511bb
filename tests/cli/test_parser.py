"""The one wrapper around the work of a command: exit codes, lines, and the rank that speaks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.mpirun import LONGEST_SECONDS, run_fresh

from axsparse.cli.parser import CommandParser, Work, overrides_of, run_command
from axsparse.config.load import configure
from axsparse.runtime.errors import MissingInputError


def ended(work: Work, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, screen and errors of a command that does this work."""
    with pytest.raises(SystemExit) as end:
        run_command(CommandParser(work), [])
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


def missing(_: argparse.Namespace) -> None:
    raise MissingInputError("a.yaml: no such file; name an existing one")


def interrupt(_: argparse.Namespace) -> None:
    raise KeyboardInterrupt


def test_exit_codes_and_lines_follow_from_what_the_work_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = "axsparse: error: a.yaml: no such file; name an existing one\n"
    assert ended(lambda _: print("done"), capsys) == (0, "done\n", "")
    assert ended(missing, capsys) == (66, "", line)
    assert ended(interrupt, capsys) == (130, "", "axsparse: error: interrupted\n")
    with pytest.raises(ZeroDivisionError):  # a mistake of the program keeps its traceback
        run_command(CommandParser(lambda _: print(1 / 0)), [])
    monkeypatch.setenv("PMI_RANK", "1")
    assert ended(missing, capsys) == (0, "", "")


def test_a_run_directory_of_digits_is_a_name() -> None:
    given = argparse.Namespace(overrides=["train.steps=3"], steps=None, run_dir="0042")

    assert configure(None, overrides_of(given)).run_dir == "0042"


def test_overrides_begin_with_their_keys() -> None:
    """As `axsparse prune` looks for them; a text without a value is left to the configuration."""
    given = argparse.Namespace(overrides=["train.steps = 2", " seed", "data.blend=[a = b]"])

    assert overrides_of(given) == ["train.steps= 2", "seed", "data.blend=[a = b]"]


def test_a_reader_that_goes_away_is_no_mistake(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "axsparse", "config", "show"]
    with os.fdopen(writing, "wb") as stdout:
        done = subprocess.run(
            command, cwd=tmp_path, stdout=stdout, stderr=subprocess.PIPE, timeout=LONGEST_SECONDS
        )
    assert (done.returncode, done.stderr) == (0, b"")


# --- mistakes that need neither torch nor MPI ---------------------------------------------

LOADED = """
import sys
from axsparse.__main__ import main

for words in {lines!r}:
    try:
        main(words)
    except SystemExit as end:
        print(end.code, file=sys.stderr)
    assert "torch" not in sys.modules and "mpi4py" not in sys.modules
"""
EARLY = {
    "train --set trian.steps=3": "78 trian.steps (--set): unknown key; did you mean train.steps?",
    "train --set model.num_heads=7": "78 model.num_heads (--set): 7 does not divide "
    "model.hidden_size 256; choose one of 1, 2, 4, 8, 16, 32, 64, 128",
    "plan --set model.num_heads=7 --gpus 4": "78 model.num_heads (--set): 7 does not divide "
    "model.hidden_size 256; choose one of 1, 2, 4, 8, 16, 32, 64, 128",
    "plan --gpus 4 --cluster summmit": "66 cluster 'summmit': no such file and no bundled cluster "
    "of that name; did you mean summit?",
}
"""Command lines, and how they end."""


def test_a_mistake_is_told_before_torch_is_loaded() -> None:
    lines = [[*line.split(), "--config", "quickstart.yaml"] for line in EARLY]
    done = run_fresh("-c", LOADED.format(lines=lines))

    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    said = done.stderr.splitlines()
    assert len(said) == 2 * len(EARLY)
    for line, code, expected in zip(said[::2], said[1::2], EARLY.values(), strict=True):
        assert line.startswith(f"axsparse: error: {expected[3:]}")
        assert code == expected[:2]
