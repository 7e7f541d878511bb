"""The bound on activations in flight, held by the engine on real stages; and what it takes in."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from support.runs import tiny_config, tiny_gpt, token_data, train_in_process

from axsparse.data.batches import Batch, Microbatch
from axsparse.observe.phases import Phases
from axsparse.pipeline.engine import (
    AHEAD_ALONE,
    MOST_AHEAD,
    MOST_UNSENT,
    MOST_WAITING,
    Engine,
    Rank,
)
from axsparse.pipeline.policy import Kind, Schedule, action
from axsparse.pipeline.stage import Stage
from axsparse.runtime.communication import Direction, Message
from axsparse.runtime.grid import Grid
from axsparse.samo.gradient_hooks import GradientCollector
from axsparse.tensor_parallel.lockstep import Lockstep

MICROBATCHES = 12
G_INTER = 4


@pytest.mark.parametrize(
    ("schedule", "extra_in_flight", "order"),
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
    schedule: str, extra_in_flight: int, order: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(
        train={"steps": 1}, pipeline={"schedule": schedule, "extra_in_flight": extra_in_flight}
    )
    forward = Stage.forward
    most: dict[int, int] = {}

    def counting(stage: Stage, *args: object) -> object:
        outputs = forward(stage, *args)  # type: ignore[arg-type]
        most[id(stage)] = max(most.get(id(stage), 0), stage.live)
        return outputs

    monkeypatch.setattr(Stage, "forward", counting)
    ranks = train_in_process(G_INTER, 1, tiny_gpt(config), config, token_data(), order=order)

    unfinished = [most[id(trainer.engine.stage)] for trainer, _ in ranks]
    if schedule == "gpipe":
        assert unfinished == [MICROBATCHES] * G_INTER
    else:
        # The last stage never waits for a backward.
        bounds = [G_INTER - stage + extra_in_flight for stage in range(G_INTER - 1)] + [1]
        assert all(most <= bound for most, bound in zip(unfinished, bounds, strict=True))
        assert unfinished[0] == bounds[0]
        assert schedule == "message-driven" or unfinished == bounds


def test_the_last_microbatch_completes_the_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over replicas begin with it, while the backward still runs; not at the end of the
    step."""
    config = tiny_config(train={"steps": 1})
    said: list[bool] = []
    microbatch = GradientCollector.microbatch

    def noting(collector: GradientCollector, *, is_last: bool) -> None:
        said.append(is_last)
        microbatch(collector, is_last=is_last)

    monkeypatch.setattr(GradientCollector, "microbatch", noting)
    train_in_process(1, 1, tiny_gpt(config), config, token_data())

    assert said == [False] * (MICROBATCHES - 1) + [True]


class Eager:
    """The link of a stage whose neighbour sends two messages at a time, as fast as it may, and
    that has nothing sent before it is looked after."""

    bytes_sent = pauses = 0

    def __init__(self, messages: int) -> None:
        self.left = deque(
            Message(Direction.FORWARD, number, (torch.ones(2),)) for number in range(messages)
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


NO_LAYERS = Stage([], loss=None, metrics={}, input_dtype=None, seed=0)


def evaluate(rank: Rank, link: Eager, count: int, stage: Stage = NO_LAYERS, **how: Any) -> None:
    """Evaluate so many empty microbatches on a stage."""
    schedule = Schedule("message-driven", 1)
    engine = Engine(rank, stage, link, schedule=schedule, while_idle=lambda: None, **how)
    engine.evaluate(Batch(0, tuple(Microbatch((), None, n, 1) for n in range(count)), count))


def test_an_evaluation_takes_in_no_more_than_it_has_use_for() -> None:
    """A slow stage's memory would fill with all that there is to evaluate."""
    link = Eager(20)

    evaluate(Rank(Grid(3, 1).coords(1), link, Phases()), link, 20)

    assert (link.taken, link.used) == (20, 20)
    assert link.most == MOST_WAITING + 1  # three wait, and two more come


def test_a_member_that_follows_runs_what_it_is_told_however_much_it_has_to_send() -> None:
    """The others stand in the same action, and wait for it there."""
    link = Eager(4)
    link.push = lambda: None  # type: ignore[method-assign]  # nothing is ever sent
    link.unsent = MOST_UNSENT + 1
    told = iter([[Kind.FORWARD, number, number == 3] for number in range(4)])
    group: Any = SimpleNamespace(rank=1, next_broadcast=lambda count: next(told))
    rank = Rank(Grid(3, 1, 2).coords(3), link, Phases())

    evaluate(rank, link, 4, around=lambda policy, _: Lockstep(group, action, policy))

    assert link.used == 4


class Late:
    """A GPU that is through with nothing before its host waits, and then with all."""

    def __init__(self) -> None:
        self.compute = self
        self.kind = torch.device("cpu")
        self.unfinished = self.most = self.bytes_sent = 0

    def record(self) -> SimpleNamespace:
        self.unfinished += 1
        self.most = max(self.most, self.unfinished)
        number = self.begun = getattr(self, "begun", 0) + 1
        return SimpleNamespace(query=lambda: number <= self.begun - self.unfinished)

    def pause(self) -> None:
        self.unfinished = 0

    def reset(self) -> None:
        """Every wait begins afresh."""


@pytest.mark.parametrize(("stages", "ahead"), [(1, AHEAD_ALONE), (2, MOST_AHEAD)])
def test_a_host_is_ahead_of_its_gpu_as_far_as_nothing_that_arrives_could_change_the_order(
    stages: int, ahead: int
) -> None:
    gpu, link = Late(), Eager(0)
    one: Any = SimpleNamespace(evaluate=lambda *_: (torch.ones(1).sum(),))
    rank = Rank(Grid(stages, 1).coords(0), cast("Any", gpu), Phases(), cast("Any", gpu))

    evaluate(rank, link, 20, stage=one)

    assert gpu.most == ahead
