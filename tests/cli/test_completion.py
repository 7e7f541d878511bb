"""The script of `axsparse completion` in a real bash."""

from __future__ import annotations

import shlex
import subprocess

import pytest
from support.mpirun import LONGEST_SECONDS

from axsparse.__main__ import COMMANDS
from axsparse.cli.all_parsers import all_parsers
from axsparse.cli.completion import script

ASK = """
compopt() { :; }  # bash refuses it where nobody types
for line in "${lines[@]}"; do
  COMPREPLY=()
  eval "COMP_WORDS=($line)"
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
  _axsparse
  echo "${COMPREPLY[*]}"
done
"""
CASES = {
    "axsparse tr": "trace train",
    "axsparse train --res": "--resume",
    "axsparse train -": "--config --help --resume --run-dir --set --steps",
    "axsparse ticket ''": "export import show",
    "axsparse ticket show --j": "--json",
    "axsparse checkpoint v": "verify",
    "axsparse plan check --pl": "--plot",
    "axsparse plan --config quick": "quickstart.yaml",
    "axsparse plan --cluster sum": "summit",
    "axsparse train --set layout.g_i": "layout.g_inter= layout.g_inter_pruned=",
    "axsparse nothing --se": "",
}


@pytest.fixture(scope="module")
def answers() -> list[str]:
    """What bash would complete in each of the cases, sorted."""
    lines = f"lines=({' '.join(map(shlex.quote, CASES))})"
    done = subprocess.run(
        ["bash", "-c", f"{script()}\n{lines}\n{ASK}"],
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
        check=True,
    )
    assert done.stderr == ""
    return [" ".join(sorted(line.split())) for line in done.stdout.split("\n")[:-1]]


@pytest.mark.parametrize("typed", CASES)
def test_what_is_typed_is_completed(typed: str, answers: list[str]) -> None:
    assert answers[[*CASES].index(typed)] == CASES[typed]


def test_no_command_is_left_out() -> None:
    assert {words.partition(" ")[0] for words in all_parsers()} == set(COMMANDS)
    assert all(parser.prog == f"axsparse {words}" for words, parser in all_parsers().items())
