"""Starts `ranks_training.py` on so many ranks, once for many cases; collects what they saved."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu.ranks_training import Case, Outcome
from support.mpirun import TESTS, Finished, run_alone, run_mpirun

ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}
LIMIT_SECONDS = 150
AT_ONCE = 10
"""Cases of a job: what they made of communicators and pinned memory is released at its end."""
ENVIRONMENT = {
    # cuBLAS adds in one order only with workspaces of a fixed size; torch asks for it.
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")])
    ),
}


def case(
    name: str,
    layout: tuple[int, int],
    settings: dict[str, Any],
    *,
    overflow_at: int | None = None,
    deterministic: bool = True,
    run_dir: Path | None = None,
    resume: Path | None = None,
) -> Case:
    """A case that can be written as JSON."""
    return Case(
        name=name,
        layout=layout,
        settings=settings,
        overflow_at=overflow_at,
        deterministic=deterministic,
        run_dir=None if run_dir is None else str(run_dir),
        resume=None if resume is None else str(resume),
    )


class CaseFailedError(AssertionError):
    """A case that a job did not end; the text is the job's."""


def train_cases(
    folder: Path, cases: Sequence[Case], environment: Mapping[str, str] | None = None
) -> dict[str, list[Outcome] | CaseFailedError]:
    """What every rank saw of each case, or how its job failed; all cases have one layout.

    A job that fails is followed by one for the cases behind the one that it failed in; one that
    runs out of time is the last.
    """
    [(stages, replicas)] = {tuple(one["layout"]) for one in cases}
    ranks = stages * replicas
    found: dict[str, list[Outcome] | CaseFailedError] = {}
    left = list(cases)
    while left:
        job = _start(ranks, folder, left[:AT_ONCE], environment or {})
        for one in left[:AT_ONCE]:
            left = left[1:]
            files = [folder / f"{one['name']}.{rank}.pt" for rank in range(ranks)]
            if not all(file.is_file() for file in files):
                found[one["name"]] = CaseFailedError(f"{one['name']}: {job}")
                if job.returncode < 0:  # it hung, and would do so in each case
                    late = [later["name"] for later in left]
                    failure = f"not begun, since {one['name']} ran out of time"
                    return found | {name: CaseFailedError(f"{name}: {failure}") for name in late}
                break
            found[one["name"]] = [torch.load(file) for file in files]
    return found


def _start(
    ranks: int, folder: Path, cases: Sequence[Case], environment: Mapping[str, str]
) -> Finished:
    listed = folder / "cases.json"
    listed.write_text(json.dumps(cases))
    words = [str(TESTS / "gpu" / "ranks_training.py"), str(folder), str(listed)]
    own = {**ENVIRONMENT, **environment}
    if ranks == 1:
        return run_alone(words, env=own, timeout=LIMIT_SECONDS)
    return run_mpirun(ranks, words, env=own, timeout=LIMIT_SECONDS)


def joined(outcomes: Sequence[Outcome], key: str) -> dict[str, torch.Tensor]:
    """The tensors of all stages by name; replicas have the same bits."""
    found: dict[str, torch.Tensor] = {}
    for outcome in outcomes:
        tensors: dict[str, torch.Tensor] = outcome[key]  # type: ignore[literal-required]
        for name, values in tensors.items():
            before = found.setdefault(name, values)
            assert torch.equal(before, values), f"replicas differ in {key} of {name}"
    return found
