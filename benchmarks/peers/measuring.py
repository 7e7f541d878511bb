"""Does runs in their order, without the ones in a log."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.launch import CHECKOUT, Failure, launch
from peers.workload import Case, Precision, Run, Size

Result = dict[str, Any] | Failure


@dataclass
class Measuring:
    """Runs contenders one after the other."""

    log: RunLog
    timeout: float
    max_foreign: float
    """Share of the machine that others may use before a run is repeated."""
    retries: int

    def result(self, run: Run, number: int) -> Result:
        """The measures of a run in a round, from the log or taken now."""
        known = self.log.get(run, number)
        if known is not None:
            return known
        began = time.monotonic()
        best = launch(run, self.timeout)
        for _ in range(self.retries):
            if isinstance(best, Failure) or best["foreign_share"] <= self.max_foreign:
                break
            again = launch(run, self.timeout)
            if not isinstance(again, Failure):
                best = min(best, again, key=lambda found: found["foreign_share"])
        self.log.put(run, number, best, time.monotonic() - began)
        self._say(run, number, best)
        return best

    def _say(self, run: Run, number: int, result: Result) -> None:
        what = f"round {number + 1} {run.size.name} {run.precision} {run.case.key}"
        if isinstance(result, Failure):
            reason = "no memory" if result.is_memory else result.reason
            found = f"failed: {reason}"
            if not run.budget:
                print(result.output, file=sys.stderr)
        else:
            busy = result["foreign_share"]
            found = f"{1e3 * result['median_seconds']:.0f} ms a step, others took {busy:.0%}"
        print(f"{what}: {found}", file=sys.stderr, flush=True)


def rounds_of(cases: Sequence[Case], rounds: int) -> list[tuple[Case, int]]:
    """All cases in every round, in the reverse order in every other one.

    What changes slowly, such as the temperature of the machine, then favours nobody.
    """
    return [
        (case, number)
        for number in range(rounds)
        for case in (reversed(cases) if number % 2 else cases)
    ]


@dataclass
class Measured:
    """The results of one size and precision, by case and round."""

    size: Size
    precision: Precision
    rows: dict[Case, dict[int, Result]] = field(default_factory=dict)

    def good(self, case: Case) -> dict[int, dict[str, Any]]:
        rows = self.rows.get(case, {})
        return {n: row for n, row in rows.items() if not isinstance(row, Failure)}

    def seconds(self, case: Case) -> Mapping[int, float]:
        """Median seconds of a step, by round."""
        return {number: row["median_seconds"] for number, row in self.good(case).items()}


MEASURING = ("workload.py", "gpt.py", "adamw.py", "rank.py", "launch.py")


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
