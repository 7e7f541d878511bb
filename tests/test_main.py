"""`axsparse` by itself: its table of commands, its help, and words that are no command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import preparing
from support.commands import Axsparse
from support.mpirun import run_fresh
from support.resuming import ran
from support.runs import tiny_config

import axsparse as ax
from axsparse.__main__ import main
from axsparse.cli import bundle
from axsparse.cli.parser import COMMANDS, all_parsers
from axsparse.data.preparation import Request
from axsparse.data.sources import token_datasets

HELP = """\
usage: axsparse COMMAND ...

commands:
  train      train what a configuration file describes (axsparse train --help)
  config     show every setting and where it comes from (axsparse config --help)
  plan       find a layout, its memory and its time, without a GPU (axsparse plan --help)
  report     draw runs as a page for a browser (axsparse report --help)
  compare    say whether two runs are the same, bit by bit (axsparse compare --help)
  data       turn text files into tokens (axsparse data --help)
  prune      prune and heal a model, or say what a run would prune (axsparse prune --help)
  generate   continue a text with a trained model (axsparse generate --help)
  evaluate   measure a trained model on validation data (axsparse evaluate --help)
  export     write what was trained for other libraries (axsparse export --help)
  submit     fill in a job script for SLURM, LSF, PBS or Flux (axsparse submit --help)
  bundle     gather wheels for where there is no network (axsparse bundle --help)
  doctor     check whether this machine is fit for training (axsparse doctor --help)
"""

HELPS = """
import contextlib, io, sys
from axsparse.__main__ import main

for line in {lines!r}:
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen), contextlib.suppress(SystemExit):
        main([*line.split(), "--help"])
    assert screen.getvalue().startswith(f"usage: axsparse {{line}}"), line
    assert not {{"torch", "mpi4py", "tokenizers"}} & set(sys.modules), line
"""


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command(axsparse: Axsparse, words: list[str]) -> None:
    assert axsparse(*words) == (0, HELP, "")


def test_every_command_has_help_that_costs_neither_torch_nor_mpi() -> None:
    code = HELPS.format(lines=["", *COMMANDS, *all_parsers()])

    assert (done := run_fresh("-c", code)).returncode == 0, done


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step on prepared tokens."""
    home = tmp_path_factory.mktemp("saved")
    (home / "words.txt").write_text("words and words\n" * 99)
    given = (home / "words.txt",)
    preparing.run(Request(given, home / "tokens", train_bpe=260, validation_fraction=0.2))
    config = tiny_config(
        model={"vocab_size": 260},
        data={"source": "tokens", "path": str(home / "tokens")},
        train={"steps": 1},
    )
    ran((1, 1), config, home / "run", data=token_datasets(home / "tokens", 12)["train"])
    return home / "run"


SMALL = "--set model.num_layers=1 --set model.hidden_size=8 --set model.num_heads=2"


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "--version",
        "config show",
        "doctor",
        "data prepare IN/words.txt --validation-fraction 0 --out IN/tokens",
        "plan --print-cluster summit",
        f"plan --gpus 2 {SMALL}",
        f"prune --dry-run {SMALL}",
        "submit --slurm --ranks 2 --time 1:00:00 --config quickstart.yaml",
        "bundle IN",
        "report RUN",
        "compare RUN RUN",
        "export RUN --to torch --out IN/w.safetensors --force",
        "evaluate RUN",
        "generate RUN --prompt words --tokens 1",
        *(f"{words} --help" for words in all_parsers()),
    ],
)
def test_output_that_cannot_be_written_ends_in_one_line_and_74(
    line: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "RUN" in line:
        line = line.replace("RUN", str(request.getfixturevalue("saved")))
    (tmp_path / "words.txt").write_text("words\n" * 99)
    full = "(No space left on device); free space where it goes, or send it elsewhere"
    for place, why in (("/dev/full", full), (None, "(it is closed); open it")):
        with Path(place or "/dev/null").open("w") as stream:
            monkeypatch.setattr(bundle, "_pip", lambda *_: None)
            monkeypatch.setattr(sys, "stdout", stream if place else None)
            with pytest.raises(SystemExit) as end:
                main(line.replace("IN", str(tmp_path)).split())
            monkeypatch.undo()

        said = capsys.readouterr().err
        assert (end.value.code, said.count("\n")) == (74, 1), said
        assert said == f"axsparse: error: stdout: cannot be written {why}\n"


def test_a_line_that_cannot_be_written_leaves_the_code_as_it_is() -> None:
    command = f"{sys.executable} -m axsparse config shw"

    for end in ("2>/dev/full", "2>&-"):
        done = subprocess.run(["sh", "-c", f"{command} {end}"], timeout=300, check=False)
        assert done.returncode == 78


INTERRUPTED = """
import os, signal, sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                pass  # as loaders in C may do

sys.meta_path.insert(0, Interrupting())
from axsparse.__main__ import main
main(["export", "x", "--to", "hf", "--out", "y"])
"""


@pytest.mark.parametrize("module", ["axsparse.cli.export", "torch"])
def test_ctrl_c_while_a_command_loads_ends_it_in_one_line(module: str) -> None:
    done = run_fresh("-c", INTERRUPTED, module)

    assert (done.returncode, done.stderr) == (130, "axsparse: error: interrupted\n")


def test_a_signal_before_a_training_has_begun_is_one_line(
    axsparse: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it reads its configuration."""

    def hang_up(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    monkeypatch.setattr("axsparse.train.reject_early", hang_up)
    ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in ends}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup hands down as ignored
    try:
        said = axsparse("train", "--config", "quickstart.yaml")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    assert said == (129, "", "axsparse: error: interrupted\n")


def test_no_command_is_left_out() -> None:
    assert {words.partition(" ")[0] for words in all_parsers()} == set(COMMANDS)
    assert all(parser.prog == f"axsparse {words}" for words, parser in all_parsers().items())


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["config", "--help"], ["config", "show"]),
        (["data", "--help"], ["data", "prepare"]),
        (["help", "plan"], ["plan"]),
        (["help", "data", "prepare"], ["data", "prepare"]),
    ],
)
def test_help_is_had_by_the_name_of_a_command_whose_second_word_may_be_left_out(
    axsparse: Axsparse, words: list[str], command: list[str]
) -> None:
    said = axsparse(*words)

    assert said == axsparse(*command, "--help")
    assert said[1].startswith(f"usage: axsparse {' '.join(command)}")


def test_the_version_is_the_packages(axsparse: Axsparse) -> None:
    assert axsparse("--version") == (0, f"axsparse {ax.__version__}\n", "")


def test_one_of_many_ranks_speaks(axsparse: Axsparse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMI_RANK", "1")

    assert axsparse("--help") == (0, "", "")
    assert axsparse("tran") == (78, "", "")
    assert axsparse("train") == (78, "", "")
    for words in (["plan", "--gpus", "2"], ["submit"], ["data"]):
        assert axsparse(*words) == (0, "", "")
