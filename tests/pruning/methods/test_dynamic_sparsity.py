"""SET and RigL as settings of a run: when masks move, how much, and what is recorded."""

from __future__ import annotations

import pytest
from support.runs import tiny_config, tiny_gpt, token_data, train_in_process

from axsparse.config.schema import Config
from axsparse.pruning.methods.dynamic_sparsity import DynamicSparsity
from axsparse.pruning.methods.masking import Masking, Moment


def settings(method: str) -> Config:
    return tiny_config(
        pruning={"method": method, "interval": 3, "until_step": 8, "drop_fraction": 0.4},
        train={"steps": 10},
    )


def test_masks_move_after_every_interval_until_they_stay() -> None:
    config = settings("set")
    seen: dict[int, str] = {}

    def note(masking: Masking, step: int) -> None:
        change = masking.before_step(Moment(step, step, lambda: None))
        if change is not None:
            seen[step] = change.text
            assert change.figures["sparsity"] == pytest.approx(0.8, abs=1e-3)
            assert change.is_ticket == (step == 6)

    [(trainer, _)] = train_in_process(1, 1, tiny_gpt(config), config, token_data())
    masking = trainer.parts.masking
    assert isinstance(masking, DynamicSparsity)
    for step in range(10):
        note(masking, step)

    assert list(seen) == [3, 6]


def test_a_skipped_step_puts_a_move_off_until_one_updates() -> None:
    config = settings("set")
    [(trainer, _)] = train_in_process(1, 1, tiny_gpt(config), config, token_data())
    masking = trainer.parts.masking

    assert masking is not None

    def moves(step: int, updates: int) -> bool:
        return masking.before_step(Moment(step, updates, lambda: None)) is not None

    assert [moves(step, step) for step in range(3)] == [False] * 3
    assert not moves(3, 2), "the step before was skipped"
    assert moves(4, 3)
