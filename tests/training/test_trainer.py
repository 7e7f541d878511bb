"""The loop of steps: when it heeds a signal."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from support.resuming import ran
from support.runs import tiny_config

from axsparse.training.trainer import Trainer


@pytest.mark.parametrize("layout", [(1, 1), (2, 2)])
def test_a_signal_while_a_step_computes_ends_the_run_after_that_step(
    layout: tuple[int, int], tmp_path: Path
) -> None:
    """It does not wait for another whole step, which may take minutes."""

    def hear_in_third_step(trainer: Trainer) -> None:
        stop = trainer._stop
        assert stop is not None

        def hear(*_: Any) -> None:
            if trainer.steps_done == 2 and not stop.is_set:
                stop.hear(signal.SIGUSR1)

        trainer.parts.layers[0].module.register_forward_hook(hear)

    found = ran(layout, tiny_config(train={"steps": 6}), tmp_path / "run", look=hear_in_third_step)

    assert max(found.losses) == 3
    assert found.stopped is not None and found.stopped.startswith("stopped after step 3, saved in ")
