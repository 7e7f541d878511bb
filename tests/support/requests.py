"""Requests for jobs, and what bash and shellcheck say of their scripts."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

from axsparse.cli.submit.job_request import JobRequest

KNOWN_TO_SHELLCHECK = "SC1091,SC2015,SC2016"
"""A file of the user's is not followed, quoted words may hold a $, `a && b || c` is meant so."""


def make_request(**values: Any) -> JobRequest:
    """Eight ranks on two nodes for two hours; keyword arguments override."""
    settings: dict[str, Any] = {
        "name": "gpt",
        "nodes": 2,
        "ranks": 8,
        "cpus_per_rank": 7,
        "threads": 1,
        "gpus_per_node": 4,
        "seconds": 7200,
        "margin": 300,
        "account": "abc123",
        "queue": "batch",
        "directives": (),
        "chain": 1,
        "launcher": "mpirun",
        "mpi": None,
        "mpirun": "mpirun",
        "folder": Path("/scratch/project"),
        "run_dir": Path("/scratch/project/runs/gpt"),
        "setup": None,
        "python": Path("/env/bin/python"),
        "prefix": Path("/env"),
        "copy_to": None,
        "train": ("-m", "axsparse.train", "--config=gpt.yaml", "--resume=auto"),
    }
    return JobRequest(**{**settings, **values})


def assert_a_shell_reads(script: str) -> None:
    """`bash -n`, and shellcheck where it is installed."""
    commands = [["bash", "-n"]]
    if shutil.which("shellcheck"):
        commands.append(["shellcheck", "--shell=bash", f"--exclude={KNOWN_TO_SHELLCHECK}", "-"])
    for command in commands:
        said = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
        assert said.returncode == 0, f"{command[0]}: {said.stdout}{said.stderr}\n{script}"


def commands_of(script: str, first_word: str) -> str:
    """The only line that begins so."""
    [line] = [line for line in script.splitlines() if line.startswith(first_word)]
    return line
