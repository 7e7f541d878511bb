"""Stands in for training: counts steps, saves, and honours USR1 and --resume auto as it does.

    python standin_trainer.py --run-dir=DIR --resume=auto …

Every rank works by itself, and leaves in DIR: `rank-R.jsonl`, an object a start (its first
step, arguments, environment) and then the steps it made; `saved-R`, the last step saved; and
`checkpoints/step-N`, empty.

STANDIN_STEPS         steps of the run
STANDIN_STEP_SECONDS  a step's length
STANDIN_WARN_AT       the step of a first start in which all ranks wait for the scheduler's warning
STANDIN_KILL_AT       the step in which the last rank is killed, once
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

EVERY = 2
"""Steps between two saves."""
WARNED_CODE = 75
"""The exit code after a warning."""
LONGEST_SECONDS = 120.0
"""How long a rank waits for the warning: far beyond what it takes."""
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "SLURM_PROCID")


def main() -> int:
    # Blocked, a signal is kept until it is looked for: it can come at no wrong moment.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--config")
    parser.add_argument("--set", action="append", dest="overrides", default=[])
    parser.add_argument("--run-dir", type=Path)
    parser.add_argument("--resume")
    arguments = parser.parse_args()
    overrides = dict(pair.split("=", 1) for pair in arguments.overrides)
    run_dir = arguments.run_dir or Path(overrides["run_dir"])
    run_dir.mkdir(parents=True, exist_ok=True)
    rank = next(int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ)
    saved = run_dir / f"saved-{rank}"
    begin = int(saved.read_text()) if arguments.resume == "auto" and saved.exists() else 0
    with (run_dir / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as log:

        def tell(line: object) -> None:
            log.write(json.dumps(line) + "\n")
            log.flush()

        tell({"begin": begin})
        for step in range(begin + 1, _number("STANDIN_STEPS", 6) + 1):
            time.sleep(float(os.environ.get("STANDIN_STEP_SECONDS", "0")))
            tell(step)
            # Only a first start is warned: a rank that was killed while it saved for the warning
            # comes to this step once more, when nobody sends it again.
            if begin == 0 and step == _number("STANDIN_WARN_AT"):
                if signal.sigtimedwait({signal.SIGUSR1}, LONGEST_SECONDS) is None:
                    return 1
                _save(saved, step)
                return WARNED_CODE
            # Before the step in which all wait for it, the warning would end ranks anywhere.
            if step > _number("STANDIN_WARN_AT") and signal.SIGUSR1 in signal.sigpending():
                _save(saved, step)
                return WARNED_CODE
            if step == _number("STANDIN_KILL_AT") and rank + 1 == int(os.environ["AXSPARSE_RANKS"]):
                killed = run_dir / "killed"
                if not killed.exists():
                    _wait_for_all(run_dir)
                    killed.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            if step % EVERY == 0:
                _save(saved, step)
    return 0


def install(folder: Path) -> Path:
    """An interpreter in a new folder that runs this instead of axsparse.train, and all else as
    usual, with the usual mpirun next to it."""
    from support.mpirun import mpirun_path  # a rank finds no module of the tests

    folder.mkdir()
    real, own = shlex.quote(sys.executable), shlex.quote(str(Path(__file__).resolve()))
    programs = {
        "mpirun": f'exec {shlex.quote(mpirun_path())} "$@"',
        "python": f'[ "$2" = axsparse.train ] || exec {real} "$@"\nshift 2\nexec {real} {own} "$@"',
    }
    for name, body in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    return folder / "python"


def _save(path: Path, step: int) -> None:
    """At once, since the rank may be killed."""
    partial = path.with_suffix(".tmp")
    partial.write_text(str(step))
    partial.rename(path)
    (path.parent / "checkpoints" / f"step-{step}").mkdir(parents=True, exist_ok=True)


def _wait_for_all(run_dir: Path) -> None:
    """Until every rank has begun: it blocks the signal, and has left a record of its start."""
    ranks = range(int(os.environ["AXSPARSE_RANKS"]))
    records = [run_dir / f"rank-{rank}.jsonl" for rank in ranks]
    while not all(record.exists() and record.stat().st_size for record in records):
        time.sleep(0.005)


def _number(name: str, otherwise: int = 0) -> int:
    return int(os.environ.get(name, otherwise))


if __name__ == "__main__":
    sys.exit(main())
