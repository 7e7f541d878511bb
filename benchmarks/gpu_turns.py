"""Trainings that take a step on request, each in a separate process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

from gpu_plan import Training

HERE = Path(__file__).parent


class WorkerFailedError(Exception):
    """The last output of the worker, in one line."""


class Worker:
    """A training in a separate process, which takes a step on request."""

    def __init__(
        self, training: Training, folder: Path, seconds: float, *, profile: bool = False
    ) -> None:
        """Ends by itself after `seconds`. `profile`: the last step is profiled, and slower."""
        run_dir = Path(tempfile.mkdtemp(dir=folder)) / "run"
        spec = {
            "config": training.config,
            "overrides": training.all(f"run_dir={run_dir}"),
            "profile": profile,
        }
        self.metrics = run_dir / "metrics.jsonl"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by __exit__
        self._process = subprocess.Popen(  # noqa: S603  our own script
            [sys.executable, str(HERE / "gpu_worker.py"), json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._late = False
        self._timer = threading.Timer(max(seconds, 0.0), self._end_late)
        self._timer.start()

    def event(self, name: str) -> dict[str, Any]:
        """The next one, which has to be that; WorkerFailedError if the process ends before."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                found: dict[str, Any] = json.loads(line[1:])
                assert found["event"] == name, f"{found['event']} instead of {name}"
                return found
        self._process.wait()
        if self._late:
            raise WorkerFailedError("ran out of time; give more by --seconds")
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        said = [line for line in lines if line.startswith("axsparse: error:")] or lines[-1:]
        code = self._process.returncode
        kept = self.metrics.with_name("traceback-rank-0.txt")  # in a folder that goes with us
        lines += kept.read_text(encoding="utf-8").splitlines() if kept.exists() else []
        print("\n".join(lines[-40:]), flush=True)
        raise WorkerFailedError(said[-1] if said else f"ended with {code} and said nothing")

    def step(self) -> dict[str, Any]:
        """Take one."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `event` says why
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        return self.event("step")

    def records(self) -> list[dict[str, Any]]:
        """The steps of its metrics.jsonl."""
        if not self.metrics.exists():
            return []
        lines = map(json.loads, self.metrics.read_text(encoding="utf-8").splitlines())
        return [line for line in lines if "step_seconds" in line]

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if kind is not None or self._process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0 if kind is not None else 60)
        if self._process.poll() is None:
            self._kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _end_late(self) -> None:
        self._late = True
        self._kill()

    def _kill(self) -> None:
        self._process.kill()
