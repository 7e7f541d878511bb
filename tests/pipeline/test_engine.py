"""The bound on activations in flight, held by the engine on real stages."""

from __future__ import annotations

from collections import deque

import pytest
import torch
from support.runs import tiny_config, tiny_gpt, token_data, train_in_process

from axsparse.data.batches import Batch, Microbatch
from axsparse.observe.phases import Phases
from axsparse.pipeline.engine import EVALUATED, MOST_UNSENT, MOST_WAITING, Engine, Rank
from axsparse.pipeline.schedules import Schedule
from axsparse.pipeline.stage import Stage
from axsparse.runtime.communication import Direction, Message
from axsparse.runtime.grid import Grid

MICROBATCHES = 12
G_INTER = 4


@pytest.mark.parametrize(
    ("schedule", "slack", "order"),
    [
        ("message-driven", 0, None),
        ("message-driven", 1, 7),
        ("message-driven", 3, 7),
        ("1f1b", 0, 7),
        ("1f1b", 3, None),
        ("gpipe", 1, 7),
    ],
)
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


class Eager:
    """The link of a stage whose neighbour sends two messages at a time, as fast as it may, and
    that has nothing sent before it is looked after."""

    bytes_sent = pauses = 0

    def __init__(self, messages: int) -> None:
        self.left = deque(
            Message(Direction.FORWARD, EVALUATED + number, (torch.ones(2),))
            for number in range(messages)
        )
        self.taken = self.used = self.most = self.unsent = 0

    def send(self, message: Message) -> None:
        self.used += 1
        self.unsent = MOST_UNSENT + 1

    def arrivals(self) -> list[Message]:
        self.push()
        found = [self.left.popleft() for _ in range(min(2, len(self.left)))]
        self.taken += len(found)
        self.most = max(self.most, self.taken - self.used)
        return found

    def push(self) -> None:
        self.unsent = 0

    def pause(self) -> None:
        raise AssertionError("there is always something to do")

    def reset(self) -> None:
        """Every wait begins afresh."""

    def close(self) -> None:
        """Nothing is held."""


def test_an_evaluation_takes_in_no_more_than_it_has_use_for() -> None:
    """A slow stage's memory would fill with all that there is to evaluate."""
    link = Eager(20)
    engine = Engine(
        Rank(Grid(3, 1).place(1), link, Phases()),
        Stage([], loss=None, metrics={}, input_dtype=None, seed=0),
        link,
        schedule=Schedule("message-driven", 1, "alternate"),
        while_idle=lambda: None,
    )
    microbatches = tuple(Microbatch((), None, number, 1) for number in range(20))

    engine.evaluate(Batch(0, microbatches, 20))

    assert (link.taken, link.used) == (20, 20)
    assert link.most == MOST_WAITING + 1  # three wait, and two more come
