"""`axsparse data prepare`, and training on what it writes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from support.commands import Axsparse
from support.mpirun import LONGEST_SECONDS

from axsparse.cli.data import parser
from axsparse.config.load import configure

TEXT = "The cat sat on the mat, and the dog did not.\n"
CONFIGS = Path(__file__).parents[2] / "configs"


def test_the_screen_says_what_was_done(
    axsparse: Axsparse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    for number in range(30):
        (tmp_path / "in" / f"{number}.txt").write_text(f"{number} {TEXT * 9}")
    monkeypatch.chdir(tmp_path)
    options = ("--out", "words", "--workers", "1", "--validation-fraction", "0")

    lines = axsparse("data", "prepare", "in", *options)[1].splitlines()

    assert lines[0] == "30 files, 12.2 kB · bytes → words"
    assert lines[1] == "train: 30 documents, 12.3k tokens"
    assert lines[2] == "train begins with 24 tokens: '0 The cat sat on the mat'"
    assert lines[3].startswith("12.2 kB in 00:0")
    assert len(lines) == 4


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_it_says_how_to_go_on(number: signal.Signals, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")
    (tmp_path / "t.json").symlink_to("never")
    (tmp_path / "a").write_text(TEXT)
    arguments = ["a", "--out", "o", "--validation-fraction", "0", "--tokenizer", "t.json"]
    # Opening a pipe that nobody writes waits, so that there is time to interrupt.
    process = subprocess.Popen(
        [sys.executable, "-m", "axsparse", "data", "prepare", *arguments],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background of a shell, or under nohup, hands down that one is ignored.
        preexec_fn=partial(signal.signal, number, signal.SIG_DFL),
    )
    try:
        # Opening the other end waits until the command has opened its own.
        with (tmp_path / "never").open("w"):
            process.send_signal(number)
            _, said = process.communicate(timeout=LONGEST_SECONDS)
    finally:
        process.kill()

    assert process.returncode == 128 + number
    assert said == (
        "axsparse: error: interrupted; start it again with the same arguments to go on\n"
    )


@pytest.mark.parametrize("name", ["gpt_wikitext103", "gpt_bookcorpus"])
def test_bundled_configs_say_how_their_data_are_prepared(name: str) -> None:
    lines = (CONFIGS / f"{name}.yaml").read_text().splitlines()
    (command,) = [line for line in lines if line.startswith("#   axsparse data prepare ")]

    arguments = parser().parse_args(shlex.split(command)[3:])

    config = configure(name)
    assert str(arguments.out) == config.data.path
    assert config.data.source == "tokens"
    assert 0 <= config.model.vocab_size - arguments.train_bpe < 128
