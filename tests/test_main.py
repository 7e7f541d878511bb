"""`axsparse` by itself: its table of commands, its help, and words that are no command."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

import axsparse
from axsparse.__main__ import COMMANDS, main

HELP = """\
usage: axsparse COMMAND ...

commands:
  train      train what a configuration file describes (axsparse train --help)
  config     show every setting and where it comes from (axsparse config --help)
  plan       find a layout, its memory and its time, without a GPU (axsparse plan --help)
  calibrate  measure this machine, for plans of it (axsparse calibrate --help)
  report     draw runs as a page for a browser (axsparse report --help)
  trace      compare two traces of steps (axsparse trace --help)
  data       turn text files into tokens (axsparse data prepare --help)
  ticket     say what a file of masks holds, or make one (axsparse ticket --help)
  prune      say what a run would prune, and what not and why (axsparse prune --help)
  checkpoint look at what a run saved (axsparse checkpoint --help)
  generate   continue a text with a trained model (axsparse generate --help)
  evaluate   measure a trained model on validation data (axsparse evaluate --help)
  export     write what was trained for other libraries (axsparse export --help)
  submit     give a training run to SLURM or LSF (axsparse submit --help)
  launch     train on this machine, and go on after failures (axsparse launch --help)
  doctor     check whether this machine is fit for training (axsparse doctor --help)
  completion let a shell complete commands (axsparse completion --help)
"""

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """`say("plan", "--help")`: exit code, screen and errors of `axsparse plan --help`."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["axsparse", *words])
        with pytest.raises(SystemExit) as end:
            main()
        told = capsys.readouterr()
        return int(end.value.code or 0), told.out, told.err

    return run


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(say: Say, words: list[str]) -> None:
    assert say(*words) == (0, HELP, "")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_of_its_own(say: Say, command: str) -> None:
    code, screen, errors = say(command, "--help")

    assert (code, errors) == (0, "")
    assert screen.startswith(f"usage: axsparse {command}")


@pytest.mark.parametrize("words", [["plan"], ["data", "prepare"], ["checkpoint", "show"]])
def test_help_of_a_command_is_had_by_its_name_as_well(say: Say, words: list[str]) -> None:
    told = say("help", *words)

    assert told == say(*words, "--help")
    assert told[1].startswith(f"usage: axsparse {' '.join(words)}")


def test_the_version_is_the_packages(say: Say) -> None:
    assert say("--version") == (0, f"axsparse {axsparse.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["tran"], "no command 'tran'; did you mean train? see axsparse --help"),
        (["chekpoint"], "no command 'chekpoint'; did you mean checkpoint? see axsparse --help"),
        (["help", "tran"], "no command 'tran'; did you mean train? see axsparse --help"),
        (["xyzzy"], "no command 'xyzzy'; see axsparse --help"),
        (
            ["data", "prepar"],
            "data: no command 'prepar'; did you mean prepare? see axsparse data --help",
        ),
    ],
)
def test_a_mistyped_command_is_one_line_with_the_nearest(
    say: Say, words: list[str], line: str
) -> None:
    assert say(*words) == (78, "", f"axsparse: error: {line}\n")


def test_one_of_many_ranks_speaks(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")

    assert say("--help") == (0, "", "")
    assert say("tran") == (78, "", "")
    assert say("train") == (78, "", "")


@pytest.mark.parametrize("options", [[], ["--steps", "3"], ["--resume", "auto"]])
def test_training_has_to_be_told_what_to_train(say: Say, options: list[str]) -> None:
    assert say("train", *options) == (
        78,
        "",
        "axsparse: error: train: nothing says what to train; name a configuration, such as "
        "--config quickstart.yaml\n",
    )


@pytest.mark.parametrize("name", axsparse.__all__)
def test_every_name_of_the_python_api_is_there(name: str) -> None:
    assert getattr(axsparse, name) is not None
