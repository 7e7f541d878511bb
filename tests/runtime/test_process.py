"""The one way out of the process."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from support.mpirun import run_fresh
from support.page_blocks import sources

END = "import atexit, threading; from axsparse.runtime.process import exit_at_once, exit_process; "


def ended(code: str) -> tuple[int, str, str]:
    done = run_fresh("-c", END + code)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("exit_process()", (0, "", "")),
        ("exit_process(75, 'saved')", (75, "", "axsparse: saved\n")),
        ("atexit.register(print, 'bye'); print('hi'); exit_process(3)", (3, "hi\nbye\n", "")),
        ("atexit.register(print, 'bye'); exit_at_once(3)", (3, "", "")),
        (
            "thread = threading.Thread(target=exit_process, args=(70, 'hung')); print('hi'); "
            "thread.start(); thread.join(); print('never')",
            (70, "hi\n", "axsparse: hung\n"),
        ),
    ],
)
def test_the_process_ends_with_its_code_and_last_line(code: str, end: tuple[int, str, str]) -> None:
    assert ended(code) == end


def test_a_reader_that_has_gone_is_no_mistake() -> None:
    command = f"{sys.executable} -c \"{END} print('x' * 99999); exit_process(5)\" | true"
    done = subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"], capture_output=True, check=False
    )

    assert done.returncode in (1, 5)  # print itself may fail; the exit adds nothing
    assert b"Exception ignored" not in done.stderr


def test_there_is_no_other_way_out() -> None:
    others = {
        name
        for name, module in sources().items()
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.exit", "os._exit")
    }

    assert others <= {"runtime.process", "samo.host.loop_compiler"}  # the latter is no rank
