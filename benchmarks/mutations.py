"""Plants the defects of mutations.yaml one by one, and says which of them the tests find.

    python benchmarks/mutations.py                  all of them
    python benchmarks/mutations.py --room samo      those of one room
    python benchmarks/mutations.py --only 3 17      some, by number
    python benchmarks/mutations.py --look           only whether each snippet and test is there

Each worker has a copy of the tree: a defect is planted in it, the tests of its row run there, and
the file is restored. Torch and pytest are imported once, and a fork of that process runs the tests.
The line of a defect names the first test that failed. A row that cannot be planted is named: its
source has changed since, and it needs another snippet.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).resolve().parents[1]
ROWS = Path(__file__).with_suffix(".yaml")
COPIED = ("axsparse", "tests", "benchmarks", "configs", "docs", "examples", "launch", "scripts")
FILES = ("pyproject.toml", "CONTRIBUTING.md", "README.md", "constraints.txt", "Makefile")
TIMEOUT_SECONDS = 240.0
"""A defect may let a loop or ranks go on for ever: tests that take so long have found it."""
FAILED = 1
"""What pytest returns if tests failed; other codes say that none were run."""


@dataclass(frozen=True)
class Mutation:
    """One row."""

    number: int
    room: str
    find: str
    """Stands once in the package."""
    put: str
    tests: tuple[str, ...]
    """Files, or tests of files; one of these fails once `find` is replaced by `put`."""

    def line(self, result: str, seconds: float, said: str) -> str:
        snippet = self.find.splitlines()[0].strip()
        return f"{self.number:3} {self.room:13} {result:16} {seconds:5.0f} s  {snippet}  {said}"


def read_rows(path: Path = ROWS) -> list[Mutation]:
    """The rows in their order."""
    rows = yaml.safe_load(path.read_text())
    return [
        Mutation(number, row["room"], row["find"], row["put"], tuple(row["tests"]))
        for number, row in enumerate(rows, start=1)
    ]


def missing(mutation: Mutation, tree: Path) -> str:
    """Why a defect cannot be planted in a tree; "" if it can."""
    if place_of(mutation, tree / "axsparse") is None:
        return "no such snippet"
    files = [tree / test.partition("::")[0] for test in mutation.tests]
    return "" if all(file.exists() for file in files) else "no such tests"


def place_of(mutation: Mutation, package: Path) -> Path | None:
    """The one file with the snippet; None if there is none, or if it stands in several places."""
    counts = {path: path.read_text().count(mutation.find) for path in package.rglob("*.py")}
    places = [path for path, count in counts.items() if count]
    return places[0] if len(places) == 1 and counts[places[0]] == 1 else None


def outcome(mutation: Mutation, copy: Path) -> tuple[str, str]:
    """Plant a defect in the copy of the tree, run its tests, and restore the file.

    Returns the outcome and the test that failed.
    """
    if reason := missing(mutation, copy):
        return reason, ""
    place = place_of(mutation, copy / "axsparse")
    assert place is not None
    text = place.read_text()
    place.write_text(text.replace(mutation.find, mutation.put))
    try:
        code, said = run_tests(mutation.tests, copy)
    finally:
        place.write_text(text)
    if code is None or code == FAILED:
        return "killed", said
    return ("survived" if code == 0 else f"pytest: code {code}"), said


def run_tests(tests: Sequence[str], copy: Path) -> tuple[int | None, str]:
    """The exit code of pytest, None if it took too long, and the first test that failed."""
    output = copy.parent / f"{copy.name}.txt"
    process = os.fork()
    if process == 0:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        code = 70
        try:
            code = _pytest(tests, copy)
        finally:
            sys.stdout.flush()
            os._exit(code)
    ends = time.monotonic() + TIMEOUT_SECONDS
    while (waited := os.waitpid(process, os.WNOHANG))[0] == 0 and time.monotonic() < ends:
        time.sleep(0.1)
    with contextlib.suppress(ProcessLookupError):  # what tests have started and left behind
        os.killpg(process, signal.SIGKILL)
    if waited[0] == 0:
        os.waitpid(process, 0)
        return None, "took too long"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output.read_text(errors="replace"), re.MULTILINE)
    return os.waitstatus_to_exitcode(waited[1]), failed[1] if failed else ""


def _pytest(tests: Sequence[str], copy: Path) -> int:
    """Run them in this process, against the package of the copy."""
    import pytest

    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)
    sys.path.insert(0, str(copy))
    command = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not fault", *tests]
    return int(pytest.main(command))


def work(rows: Sequence[Mutation], copy: Path, said: multiprocessing.SimpleQueue[str]) -> None:
    """Judge rows in a copy of its own, and say a line of each."""
    copy_tree(copy)
    for mutation in rows:
        began = time.monotonic()
        result, test = outcome(mutation, copy)
        print(mutation.line(result, time.monotonic() - began, test), flush=True)
        said.put(result)


def copy_tree(target: Path) -> None:
    """Copy what the tests need."""
    skipped = shutil.ignore_patterns("__pycache__", ".*_cache")
    for name in COPIED:
        shutil.copytree(REPOSITORY / name, target / name, ignore=skipped)
    for name in FILES:
        shutil.copy(REPOSITORY / name, target / name)


def main() -> int:
    """Print a row for each mutation and a line of sums; exit code 1 unless all were killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--room", help="only defects in one room")
    parser.add_argument("--only", type=int, nargs="*", help="only these numbers, from 1")
    parser.add_argument("--look", action="store_true", help="only look for snippets and tests")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    rows = [
        row
        for row in read_rows()
        if (not chosen.only or row.number in chosen.only) and chosen.room in (None, row.room)
    ]
    if chosen.look:
        lost = {row: reason for row in rows if (reason := missing(row, REPOSITORY))}
        for row, reason in lost.items():
            print(row.line(reason, 0.0, ""))
        print(f"{len(rows) - len(lost)} of {len(rows)} can be planted")
        return int(bool(lost))
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    import torch  # noqa: F401 - for the forks

    forks = multiprocessing.get_context("fork")
    said = forks.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            forks.Process(
                target=work, args=(rows[n :: chosen.workers], Path(folder) / f"tree{n}", said)
            )
            for n in range(chosen.workers)
        ]
        for worker in workers:
            worker.start()
        found = Counter(said.get() for _ in rows)
        for worker in workers:
            worker.join()
    print(", ".join(f"{count} {result}" for result, count in found.most_common()))
    return int(found.keys() != {"killed"})


if __name__ == "__main__":
    sys.exit(main())
