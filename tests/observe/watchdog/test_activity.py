"""What a rank is doing can be asked for at any moment."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.resuming import ran
from support.runs import tiny_config, tiny_gpt, token_data, train_in_process

from axsparse.data.batches import Batch, Microbatch
from axsparse.observe.phases import Phases
from axsparse.observe.watchdog.watchdog import Activity, Task
from axsparse.pipeline.engine import Engine, Rank
from axsparse.pipeline.schedules import Schedule
from axsparse.pipeline.stage import Stage
from axsparse.runtime.backoff import SleepingBackoff
from axsparse.runtime.communication import Message
from axsparse.runtime.grid import Grid
from axsparse.training.trainer import Trainer


def test_work_beats_and_waiting_pauses() -> None:
    phases, backoff = Phases(), SleepingBackoff()
    activity = Activity(phases, backoff, list)

    with phases("bubble"):
        backoff.pause()
        backoff.reset()
        backoff.pause()
        assert (activity.beats, activity.backoff.pauses) == (0, 2)
    with phases("compute"):
        worked = activity.beats
    activity.beat()
    assert 0 < worked < activity.beats
    beats = activity.beats

    activity.at("evaluation", 7)

    assert (activity.task, activity.step, activity.beats) == ("evaluation", 7, beats + 1)


def test_training_says_what_it_is_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(
        train={"steps": 2, "eval_every": 2, "eval_steps": 1},
        checkpoint={"every": 2},
        pruning={"at_step": 1},
    )
    said: list[tuple[Task, int]] = []
    at = Activity.at

    def note(self: Activity, task: Task, step: int) -> None:
        said.append((task, step))
        at(self, task, step)

    monkeypatch.setattr(Activity, "at", note)
    trainers: list[Trainer] = []

    ran((1, 1), config, tmp_path, validation=token_data(), look=trainers.append)

    assert said == [
        ("masks", 0),
        ("training", 1),
        ("masks", 1),
        ("training", 2),
        ("evaluation", 2),
        ("checkpoint", 2),
        ("checkpoint", 2),
    ]
    assert trainers[0].parts.activity.steps == 2


class Silence:
    """A link on which nothing arrives, and a back-off that gives up."""

    bytes_sent = unsent = pauses = 0

    def send(self, message: Message) -> None:
        """Nobody takes it."""

    def arrivals(self) -> list[Message]:
        return []

    def push(self) -> None:
        """Nothing is sent."""

    def pause(self) -> None:
        raise TimeoutError

    def reset(self) -> None:
        """There is nothing to reset."""

    def close(self) -> None:
        """Nothing is held."""


def engine_of(stage: int) -> Engine:
    silence = Silence()
    return Engine(
        Rank(Grid(3, 2).place(3 + stage), silence, Phases()),
        Stage([], loss=None, metrics={}, input_dtype=None, seed=0),
        silence,
        schedule=Schedule("message-driven", 1, "alternate"),
        while_idle=lambda: None,
    )


@pytest.mark.parametrize(
    ("stage", "awaited"),
    [
        (1, ["activation 0 from rank 3", "gradient 0 from rank 5"]),
        (2, ["activation 0 from rank 4"]),
    ],
)
def test_a_stage_that_waits_says_for_which_messages(stage: int, awaited: list[str]) -> None:
    engine = engine_of(stage)
    microbatches = tuple(Microbatch((), None, number, 1) for number in range(4))
    assert engine.awaited() == []

    with pytest.raises(TimeoutError):
        engine.train(Batch(0, microbatches, num_targets=1), 1.0, 1.0, lambda _: None)

    assert engine.awaited() == awaited


def test_what_has_come_is_awaited_no_more() -> None:
    heard: list[list[str]] = []
    engines: list[Engine] = []

    def listen(trainer: Trainer) -> None:
        if trainer.parts.place.rank == 0:
            engine, link = trainer.parts.engine, trainer.parts.link
            engines.append(engine)
            arrivals = link.arrivals

            def look() -> list[Message]:
                heard.append(engine.awaited())
                return arrivals()

            vars(link)["arrivals"] = look

    config = tiny_config(train={"steps": 1}, batch={"global_batch_size": 8})
    train_in_process(2, 1, tiny_gpt(config), config, token_data(), before=listen)

    awaited = [text for (text,) in filter(None, heard)]
    assert awaited == sorted(awaited)
    assert awaited[0] == "gradient 0 from rank 1" != awaited[-1]
    assert engines[0].awaited() == []
