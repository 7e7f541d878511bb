"""How sparsity grows and how many weights move, as pure functions of the step."""

from __future__ import annotations

import math


def gradual_sparsity(step: int, *, final: float, begin: int, end: int, every: int) -> float:
    """The sparsity that holds at a step: rising from 0, fast at first (Zhu & Gupta 2017, eq. 1).

    s(t) = final · (1 − (1 − x)³),  x = (t − begin) / (end − begin)

    at t = begin + every, begin + 2 · every, …; between them the last one's, and `final`,
    exactly, from `end` on.
    """
    if step >= end:
        return final
    if step <= begin:
        return 0.0
    progress = (step - begin) // every * every / (end - begin)
    return final * (1 - (1 - progress) ** 3)


def iterative_sparsity(number: int, *, final: float, rounds: int) -> float:
    """The sparsity after round `number` (from 0: nothing pruned yet) of `rounds`.

    1 − s(r) = (1 − final)^(r / rounds): each round removes the same share of what is left
    (Frankle & Carbin 2019, section 1), and the last ends at `final`, exactly.
    """
    assert 0 <= number <= rounds
    return final if number == rounds else 1 - (1 - final) ** (number / rounds)


def drop_fraction(step: int, *, alpha: float, end: int) -> float:
    """The share of kept weights that is dropped, and grown elsewhere, at a step.

    f(t) = alpha / 2 · (1 + cos(π · t / end)) until `end` (Evci et al. 2020, section 3), then 0
    """
    return 0.0 if step >= end else alpha / 2 * (1 + math.cos(math.pi * step / end))
