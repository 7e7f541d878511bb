"""Finished runs, kept in a file, so that a comparison that was cut off goes on where it was."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.launch import CHECKOUT, Failure
from peers.workload import Run

MEASURING = ("workload.py", "gpt.py", "adamw.py", "meters.py", "rank.py", "launch.py")


def code_digest(versions: str) -> str:
    """A digest of all that a measured figure depends on: our package, what measures, versions."""
    digest = hashlib.blake2b(versions.encode(), digest_size=8)
    peers = Path(__file__).parent
    files = [
        *sorted((CHECKOUT / "axsparse").rglob("*.py")),
        *(peers / name for name in MEASURING),
        *sorted((peers / "contenders").glob("*.py")),
    ]
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()


@dataclass
class RunLog:
    """Runs by what was run, with which code, and the number of the round."""

    path: Path
    code: str
    _found: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for row in self._rows():
            if row["code"] == self.code:
                self._found[row["run"], row["round"]] = row

    def _rows(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            # The last line is cut off if the comparison was killed while it wrote.
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def get(self, run: Run, number: int) -> dict[str, Any] | Failure | None:
        """The result of a run in a round; None if it is still to be done."""
        row = self._found.get((run.text(), number))
        if row is None:
            return None
        return Failure(**row["failure"]) if "failure" in row else row["result"]

    def put(self, run: Run, number: int, result: dict[str, Any] | Failure, seconds: float) -> None:
        row: dict[str, Any] = {"code": self.code, "round": number, "run": run.text()}
        row["wall_seconds"] = round(seconds, 1)
        if isinstance(result, Failure):
            row["failure"] = {"reason": result.reason, "output": result.output}
        else:
            row["result"] = result
        with self.path.open("a", encoding="utf-8") as file:
            # A line that was cut off must not swallow the next one.
            file.write(f"\n{json.dumps(row)}\n")
        self._found[run.text(), number] = row

    def seconds(self, run: Run) -> float | None:
        """How long this run took, start included, when it was last done."""
        text = run.text()
        taken = [row["wall_seconds"] for (key, _), row in self._found.items() if key == text]
        return taken[-1] if taken else None
