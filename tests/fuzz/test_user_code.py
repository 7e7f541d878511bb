"""What users write around a model is refused, or trains the same in every layout.

`make test` judges a few drawn programs, `make test-all` forty, and `AXSPARSE_MODELS=5000` so many.
`AXSPARSE_PROGRAM='{…}'` judges the one program of a line that a failure printed.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from fuzz.user_code import Program, draw, items, judge, smaller

PROGRAMS = int(os.environ.get("AXSPARSE_MODELS", "5"))
SEED = os.environ.get("AXSPARSE_MODELS_SEED", "")
ONE = os.environ.get("AXSPARSE_PROGRAM", "")
KNOWN = (
    *(
        (1, Program(loss=f"noise by {source}"))
        for source in ("torch", "dropout", "python", "numpy")
    ),
    (1, Program(loss="noise by torch", recompute=1, split_backward=True)),
    *((2, Program(callback=each)) for each in ("raises dropout", "starts to draw")),
    (2, Program(callback="starts to draw", recompute=1)),
    (2, Program(callback="raises dropout", noise=("torch training", "", ""), recompute=1)),
    *((3, Program(noise=("", f"{each} training", ""))) for each in ("python", "numpy")),
    (3, Program(noise=("python training", "", ""), declared=False)),
    *((4, Program(init=each)) for each in ("own generator", "torch", "python", "numpy")),
    (4, Program(init="own generator", at_step=2)),
    *((5, Program(noise=("", f"{each} always", ""))) for each in ("torch", "dropout", "python")),
    (6, Program(callback="gradients off")),
    *((8, Program(loss=f"mean{more}")) for more in ("", ", scalar beside", " of flattened")),
    (9, Program(loss="trained")),
    (9, Program(callback="freezes")),
    (9, Program(callback="freezes", optimizer="sgd")),
    *((10, Program(count=each)) for each in ("-1", "0", "0.5", "nan")),
)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")


@pytest.mark.skipif(not ONE, reason="judges the program of AXSPARSE_PROGRAM alone")
def test_one_program(tmp_path: Path) -> None:
    print(judge(Program.read(ONE), tmp_path))


@pytest.mark.parametrize(
    ("number", "program"),
    [
        pytest.param(
            number,
            program,
            id=f"item {number} {program.line()}",
            marks=() if at % 3 == 0 else pytest.mark.exhaustive,
        )
        for at, (number, program) in enumerate(KNOWN)
    ],
)
def test_what_was_wrong_once_is_right(number: int, program: Program, tmp_path: Path) -> None:
    assert number in items(program)

    judge(program, tmp_path)


@pytest.mark.skipif(bool(ONE), reason="AXSPARSE_PROGRAM asks for one program alone")
def test_drawn_programs_are_refused_or_train_the_same_everywhere(tmp_path: Path) -> None:
    counts, failures = Counter[str](), dict[str, str]()
    rng = Random(f"programs {SEED}")  # noqa: S311 - to be drawn again
    while counts.total() < PROGRAMS:
        program = draw(rng)
        try:
            counts[judge(program, tmp_path)] += 1
        except Exception as failure:
            kind = kind_of(failure)
            counts[f"failed: {kind}"] += 1
            failures.setdefault(kind, reduced(program, tmp_path, kind).line())
    if PROGRAMS > 100:
        print("\n".join(f"{count:6} {kind}" for kind, count in counts.most_common()))
    assert not failures, "; ".join(
        f"{kind}: AXSPARSE_PROGRAM='{line}'" for kind, line in failures.items()
    )


def kind_of(failure: BaseException | None) -> str:
    """What is wrong, without the numbers."""
    return f"{type(failure).__name__}: {str(failure).partition(': {')[0][:90]}"


def reduced(program: Program, folder: Path, kind: str) -> Program:
    """A program with fewer peculiarities that fails alike."""
    for candidate in smaller(program):
        if kind_of(failure_of(candidate, folder)) == kind:
            return reduced(candidate, folder, kind)
    return program


def failure_of(program: Program, folder: Path) -> Exception | None:
    try:
        judge(program, folder)
    except Exception as failure:
        return failure
    return None
