"""The script of `axsparse completion` in a real bash, and in a real zsh, which types."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from support.mpirun import LONGEST_SECONDS

from axsparse.cli.commands import COMMANDS, all_parsers
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
    "axsparse ticket ''": "show",
    "axsparse ticket show --j": "--json",
    "axsparse checkpoint v": "verify",
    "axsparse plan --config quick": "quickstart.yaml",
    "axsparse plan --cluster sum": "summit",
    "axsparse train --set layout.g_i": "layout.g_inter=",
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


TYPED = {
    "axsparse comple": "axsparse completion ",
    "axsparse tr": "axsparse tra",
    "axsparse train --res": "axsparse train --resume ",
    "axsparse ticket show --j": "axsparse ticket show --json ",
    "axsparse checkpoint v": "axsparse checkpoint verify ",
    "axsparse plan --config quick": "axsparse plan --config quickstart.yaml ",
    "axsparse plan --config here": "axsparse plan --config here.yaml",
    "axsparse plan --cluster sum": "axsparse plan --cluster summit ",
    "axsparse train --set precis": "axsparse train --set precision=",
    "axsparse train --set layout.g_i": "axsparse train --set layout.g_inter",
    "axsparse report fol": "axsparse report folder",
    "axsparse nothing --se": "axsparse nothing --se",
}
"""What stands on the command line of zsh after a tabulator."""


def typed_in_zsh(folder: Path) -> list[str]:
    """What each of `TYPED` becomes in an interactive zsh with nothing but our script."""
    (folder / "script").write_text(script())
    (folder / "here.yaml").touch()
    (folder / "folder").mkdir()
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        home = {**os.environ, "TERM": "dumb", "HOME": str(folder)}
        os.execvpe("zsh", ["zsh", "-f", "-i"], home)  # noqa: S606 - it is all that is wanted
    # The first and the last key go to the line's ends, so that it is quoted and printed.
    lines = [f"{line}\t\x01print -r 'gives <\x05>'\n" for line in TYPED]
    os.write(terminal, "".join([". ./script; stty -echo\n", *lines, "exit\n"]).encode())
    shown = b""
    while select.select([terminal], [], [], LONGEST_SECONDS)[0]:
        try:
            data = os.read(terminal, 65_536)
        except OSError:  # it has ended
            break
        shown += data
    os.close(terminal)
    os.waitpid(child, 0)
    return re.findall(r"^gives <(.*)>\r$", shown.decode(), re.MULTILINE)


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed: apt-get install zsh")
def test_what_is_typed_is_completed_in_zsh(tmp_path: Path) -> None:
    assert typed_in_zsh(tmp_path) == [*TYPED.values()]
