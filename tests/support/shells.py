"""What bash and shellcheck say of a script."""

from __future__ import annotations

import shutil
import subprocess

KNOWN_TO_SHELLCHECK = "SC1091,SC2015,SC2016"
"""A file of the user's is not followed, quoted words may hold a $, `a && b || c` is meant so."""


def assert_a_shell_reads(script: str) -> None:
    """`bash -n`, and shellcheck where it is installed."""
    commands = [["bash", "-n"]]
    if shutil.which("shellcheck"):
        commands.append(["shellcheck", "--shell=bash", f"--exclude={KNOWN_TO_SHELLCHECK}", "-"])
    for command in commands:
        said = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
        assert said.returncode == 0, f"{command[0]}: {said.stdout}{said.stderr}\n{script}"
