"""Plants the defects of mutations.yaml one by one, and says which of them the tests find.

    python benchmarks/mutations.py                  all of them
    python benchmarks/mutations.py --room samo      those of one room
    python benchmarks/mutations.py --only 3 17      some, by number

The tree is copied once; each defect is planted in the copy, the tests of its row run there, and
the file is restored. A row that cannot be planted is named: its source has changed since, and it
needs another snippet.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
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
TIMEOUT_SECONDS = 900.0
"""A defect may let ranks wait for each other: tests that take so long have found it."""
FAILED = 1
"""What pytest returns if tests failed; other codes say that none were run."""


@dataclass(frozen=True)
class Mutation:
    """One row."""

    room: str
    find: str
    """Stands once in the package."""
    put: str
    tests: tuple[str, ...]
    """One of these fails once `find` is replaced by `put`."""


def read_rows(path: Path = ROWS) -> list[Mutation]:
    """The rows in their order."""
    rows = yaml.safe_load(path.read_text())
    return [Mutation(row["room"], row["find"], row["put"], tuple(row["tests"])) for row in rows]


def place_of(mutation: Mutation, package: Path) -> Path | None:
    """The one file with the snippet; None if there is none, or if it stands in several places."""
    counts = {path: path.read_text().count(mutation.find) for path in package.rglob("*.py")}
    places = [path for path, count in counts.items() if count]
    return places[0] if len(places) == 1 and counts[places[0]] == 1 else None


def outcome(mutation: Mutation, copy: Path) -> str:
    """Plant a defect in the copy of the tree, run its tests, and restore the file."""
    place = place_of(mutation, copy / "axsparse")
    tests = [test for test in mutation.tests if (copy / test).exists()]
    if place is None:
        return "no such snippet"
    if not tests:
        return "no such tests"
    text = place.read_text()
    place.write_text(text.replace(mutation.find, mutation.put))
    try:
        code = run_tests(tests, copy)
    finally:
        place.write_text(text)
    if code is None or code == FAILED:
        return "killed"
    return "survived" if code == 0 else f"pytest: code {code}"


def run_tests(tests: Sequence[str], copy: Path) -> int | None:
    """The exit code of pytest; None if it took too long."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "not exhaustive and not fault", *tests]
    try:
        done = subprocess.run(  # noqa: S603 - our own command
            command, cwd=copy, env=environment, capture_output=True, timeout=TIMEOUT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return None
    return done.returncode


def copy_tree(target: Path) -> None:
    """Copy what the tests need."""
    skipped = shutil.ignore_patterns("__pycache__", ".*_cache")
    for name in COPIED:
        shutil.copytree(REPOSITORY / name, target / name, ignore=skipped)
    for name in FILES:
        shutil.copy(REPOSITORY / name, target / name)


def main() -> None:
    """Print a row for each mutation and a line of sums; exit code 1 unless all were killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--room", help="only defects in one room")
    parser.add_argument("--only", type=int, nargs="*", help="only these numbers, from 1")
    chosen = parser.parse_args()
    found = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        copy_tree(copy)
        for number, mutation in enumerate(read_rows(), start=1):
            if chosen.only and number not in chosen.only:
                continue
            if chosen.room and mutation.room != chosen.room:
                continue
            began = time.monotonic()
            result = outcome(mutation, copy)
            found[result] += 1
            seconds = time.monotonic() - began
            line = mutation.find.splitlines()[0].strip()
            print(f"{number:3} {mutation.room:13} {result:16} {seconds:5.0f} s  {line}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in found.most_common()))
    sys.exit(found.keys() != {"killed"})


if __name__ == "__main__":
    main()
