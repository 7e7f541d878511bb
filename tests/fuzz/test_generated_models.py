"""Generated models train to the same bits under every layout, resume anywhere, or are refused.

Half of them have layers that several tensor-parallel ranks share.

`make test` checks a few, `make test-all` forty, and `AXSPARSE_MODELS=5000` so many.
`AXSPARSE_MODELS_SEED=1` draws others, and `AXSPARSE_MODEL='{…}'` checks the one case of a line that
a failure printed.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from fuzz.model_generator import Case, draw
from fuzz.model_judge import NotAModelError, judge, reduced, signature
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.sums import sample_all

MODELS = int(os.environ.get("AXSPARSE_MODELS", "5"))
SEED = os.environ.get("AXSPARSE_MODELS_SEED", "")
ONE = os.environ.get("AXSPARSE_MODEL", "")


@pytest.mark.skipif(not ONE, reason="judges the case of AXSPARSE_MODEL alone")
@pytest.mark.parametrize("is_sampled", [False, True], ids=["whole", "sampled"])
def test_one_generated_model(
    is_sampled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_sampled:
        sample_all(monkeypatch)
    print(judge(Case.read(ONE), tmp_path))


def tell(counts: Counter[str], seconds: float) -> None:
    """How the models went so far."""
    print(f"\n{counts.total()} models in {seconds:.0f} s")
    for kind, count in counts.most_common():
        print(f"{count:6} {kind}", flush=True)


@pytest.mark.skipif(bool(ONE), reason="AXSPARSE_MODEL asks for one case alone")
def test_generated_models(tmp_path: Path) -> None:
    """Check N models; fails at the end with a case of each kind of failure, made smaller.

    Every third has sparse products, which have torch's bits here, so that nothing else may change.
    """
    counts, failures = Counter[str](), dict[str, str]()
    begin = time.monotonic()

    @settings(
        max_examples=MODELS,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],  # `reduced` makes cases smaller, one of each kind of failure
        suppress_health_check=list(HealthCheck),
    )
    @given(st.randoms(use_true_random=True))
    def judge_next(rng: Random) -> None:
        case = draw(Random(f"{SEED} {rng.random()}"))  # noqa: S311 - to be drawn again
        with pytest.MonkeyPatch.context() as patch:
            if counts.total() % 3 == 2:
                sample_all(patch)
            judge_one(case)

    def judge_one(case: Case) -> None:
        of = "members" if case.members > 1 else "whole"
        try:
            counts[f"{of}: {judge(case, tmp_path)}"] += 1
        except NotAModelError as reason:
            counts[f"{of}: not a model: {signature(reason)}"] += 1
        except Exception as failure:
            kind = signature(failure)
            counts[f"{of}: failed: {kind}"] += 1
            if kind not in failures:
                print(f"{kind}\n    AXSPARSE_MODEL='{case.line()}'\n  made smaller:", flush=True)
                failures[kind] = reduced(case, tmp_path, failure).line()
                print(f"{kind}\n    AXSPARSE_MODEL='{failures[kind]}'", flush=True)

        if counts.total() % 25 == 0 and MODELS > 100:
            tell(counts, time.monotonic() - begin)

    judge_next()
    assert not failures, "; ".join(
        f"{kind}: AXSPARSE_MODEL='{line}'" for kind, line in failures.items()
    )
