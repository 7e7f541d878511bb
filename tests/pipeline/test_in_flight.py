"""The bound on activations in flight, held by the engine on real stages."""

from __future__ import annotations

import pytest
from support.runs import tiny_config, tiny_gpt, token_data, train_in_process

from axsparse.pipeline.stage import Stage

MICROBATCHES = 12
G_INTER = 4


@pytest.mark.parametrize("slack", [0, 1, 3])
@pytest.mark.parametrize("schedule", ["message-driven", "1f1b", "gpipe"])
@pytest.mark.parametrize("order", [None, 7])
def test_a_stage_holds_no_more_activations_than_its_schedule_allows(
    schedule: str, slack: int, order: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(train={"steps": 1}, pipeline={"schedule": schedule, "slack": slack})
    forward = Stage.forward
    most: dict[int, int] = {}

    def counting(stage: Stage, *args: object) -> object:
        outputs = forward(stage, *args)  # type: ignore[arg-type]
        most[id(stage)] = max(most.get(id(stage), 0), stage.live)
        return outputs

    monkeypatch.setattr(Stage, "forward", counting)
    ranks = train_in_process(G_INTER, 1, tiny_gpt(config), config, token_data(), order=order)

    held = [most[id(trainer.parts.engine._stage)] for trainer, _ in ranks]
    if schedule == "gpipe":
        assert held == [MICROBATCHES] * G_INTER
    else:
        # The last stage never waits for a backward.
        bounds = [G_INTER - stage + slack for stage in range(G_INTER - 1)] + [1]
        assert all(most <= bound for most, bound in zip(held, bounds, strict=True))
        assert held[0] == bounds[0]
        assert schedule == "message-driven" or held == bounds
