"""The loop of steps: when it heeds a signal."""

from __future__ import annotations

import dataclasses
import re
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.images import assert_equal_tensors
from support.local_world import WorldLink
from support.resuming import ran
from support.runs import (
    FEW_MICROBATCHES,
    alone,
    mlp,
    on_ranks,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
    vector_data,
)

import axsparse as ax
from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets
from axsparse.observe.watchdog.watchdog import THREAD
from axsparse.planner.stage_memory import SMALL_BLOCKS
from axsparse.runtime.communication import Transport, wait
from axsparse.runtime.errors import ConfigError, MissingInputError
from axsparse.runtime.job import Job, _describe
from axsparse.training import run_recorder
from axsparse.training.checkpoint.checkpoint_folder import saved_steps
from axsparse.training.evaluation import Evaluation
from axsparse.training.trainer import OnCheckpoint, OnEvaluation, OnStep, Trainer, build

Heard = tuple[str, int, object]


def train_heard(
    run_dir: Path, ranks: int, on_step: OnStep, on_evaluation: OnEvaluation, on_saved: OnCheckpoint
) -> None:
    """A training of four steps on so many stages, each a thread."""
    config = tiny_config(
        train={"steps": 4, "eval_every": 2, "eval_steps": 1},
        checkpoint={"every": 2},
        layout={"g_inter": ranks},
        run_dir=str(run_dir),
    )
    data = Datasets(vector_data(), vector_data())

    def body(transport: Transport) -> None:
        trainer = build(Job(transport), mlp(), lambda: data, config)
        trainer.train(on_step, on_evaluation=on_evaluation, on_checkpoint=on_saved)

    on_ranks(ranks, body)


@pytest.mark.parametrize("ranks", [1, 2])
def test_close_saves_while_an_exception_is_handled_unless_other_ranks_may_not_have_raised_it(
    ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(
        train={"steps": 4, "eval_every": 0}, layout={"g_inter": ranks}, run_dir=str(tmp_path)
    )

    def body(transport: Transport) -> None:
        data = Datasets(vector_data(), None)
        trainer = build(Job(transport), mlp(), lambda: data, config)
        trainer.step()
        try:
            raise LookupError("enough")
        except LookupError:
            trainer.close()

    on_ranks(ranks, body)

    said = (
        f"closed after step 1, saved in {tmp_path}/checkpoints; resume='auto' goes on"
        if ranks == 1
        else "warning: closed after step 1, which is not saved, since other ranks may not have "
        "raised LookupError; call close() after its except"
    )
    assert said in capsys.readouterr().out
    assert [*saved_steps(tmp_path / "checkpoints")] == ([1] if ranks == 1 else [])


def test_a_callback_of_evaluations_that_never_are_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config(train={"steps": 1, "eval_steps": 1}, run_dir=str(tmp_path / "run"))
    alone(mlp(), config, vector_data(), quiet=False).train(on_evaluation=print)

    said = "warning: on_evaluation is never called: there are no validation data, or train."
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("main_thread", "handler", "says"),
    [
        (False, signal.SIG_DFL, True),
        (False, signal.default_int_handler, False),
        (True, signal.SIG_DFL, False),
    ],
)
def test_a_run_that_no_signal_reaches_says_so(
    main_thread: bool,
    handler: Any,
    says: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def train() -> None:
        config = tiny_config(train={"steps": 1}, run_dir=str(tmp_path / "run"))
        alone(mlp(), config, vector_data(), quiet=False).train()

    before = signal.signal(signal.SIGTERM, handler)
    try:
        if main_thread:
            train()
        else:
            with ThreadPoolExecutor(1) as another:
                another.submit(train).result()
    finally:
        signal.signal(signal.SIGTERM, before)

    assert ("outside the main thread no signal saves" in capsys.readouterr().out) == says


def test_every_rank_hears_the_same_in_the_same_order(tmp_path: Path) -> None:
    heard: dict[int, list[Heard]] = defaultdict(list)

    def note(what: str) -> Callable[[int, Any], None]:
        def noting(step: int, value: Any) -> None:
            if isinstance(value, Path):
                assert (value / "manifest.json").is_file()
            told = value.name if isinstance(value, Path) else value.loss
            heard[threading.get_ident()].append((what, step, told))

        return noting

    train_heard(tmp_path / "run", 2, note("step"), note("evaluation"), note("checkpoint"))

    first, second = heard.values()
    assert first == second
    told = [(what, step) for what, step, _ in first]
    two = ["step", "step", "evaluation"]
    expected = [*zip(two * 2, (1, 2, 2, 3, 4, 4), strict=True)]
    assert [one for one in told if one[0] != "checkpoint"] == expected
    # When a thread has written the first is chance; it never comes before its evaluation.
    assert [one for one in told if one[0] == "checkpoint"] == [("checkpoint", 2), ("checkpoint", 4)]
    assert told.index(("checkpoint", 2)) > told.index(("evaluation", 2))
    assert told[-1] == ("checkpoint", 4)
    assert ("checkpoint", 2, "step-2") in first


@pytest.mark.parametrize(
    ("failing", "where"),
    [
        (0, "on_step after step 1"),
        (1, "on_evaluation after step 2"),
        (2, "on_checkpoint of step 2"),
    ],
)
def test_the_line_of_a_callback_that_fails_names_it(
    failing: int, where: str, tmp_path: Path
) -> None:
    def fail(step: int, value: object) -> None:
        raise ValueError("my own mistake")

    callbacks: list[Callable[[int, Any], None]] = [lambda step, value: None] * 3
    callbacks[failing] = fail

    with pytest.raises(ValueError, match="my own mistake") as failure:
        train_heard(tmp_path / "run", 1, callbacks[0], callbacks[1], callbacks[2])

    assert _describe(failure.value) == (70, f"{where}: ValueError: my own mistake")
    assert _describe(KeyboardInterrupt(), "all is kept") == (130, "interrupted; all is kept")


@pytest.mark.parametrize(
    ("ending", "step", "evaluations", "answer"),
    [("step", 3, [2, 3], np.bool_), ("evaluation", 2, [2], torch.tensor)],
)
def test_a_callback_that_returns_true_on_one_rank_ends_the_run_as_its_last_step_does(
    ending: str,
    step: int,
    evaluations: list[int],
    answer: Callable[[bool], object],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    heard: dict[str, list[int]] = defaultdict(list)
    first: list[int] = []

    def note(what: str) -> Callable[[int, Any], object]:
        def noting(at: int, value: Any) -> object:
            del value
            first.append(threading.get_ident())
            if threading.get_ident() != first[0]:
                return "not True"
            heard[what].append(at)
            return answer(what == ending and at == step)

        return noting

    train_heard(tmp_path / "run", 2, note("step"), note("evaluation"), note("checkpoint"))

    assert heard["step"] == list(range(1, step + 1))
    assert heard["evaluation"] == evaluations
    assert saved_steps(tmp_path / "run" / "checkpoints") == ([3, 2] if step == 3 else [2])
    assert f"on_{ending} ends the run after step {step}/4" in capfd.readouterr().out


class Streamed(ax.ArrayDataset):
    """Samples of an iterator that ends."""

    def read(self, rows: Any, *more: Any) -> Any:
        next(iter(()))


def test_data_that_end_within_a_loop_do_not_end_it_as_its_last_step_does() -> None:
    data = vector_data()
    inputs, targets = data.read(np.arange(30))
    config = tiny_config(train={"steps": 6, "eval_every": 2, "eval_steps": 1})
    trainer = alone(mlp(), config, data, Streamed(inputs[0], targets))

    with pytest.raises(RuntimeError, match="generator raised StopIteration"):
        [trainer.step() for _ in trainer]


def test_settings_of_a_trainer_are_not_replaced() -> None:
    trainer = alone(mlp(), tiny_config(), vector_data())

    for name in ("config", "learning_rate"):
        with pytest.raises(AttributeError):
            setattr(trainer, name, getattr(trainer, name))


def test_a_step_after_the_last_one_is_refused_once_the_last_one_is_saved(tmp_path: Path) -> None:
    config = tiny_config(train={"steps": 2}, run_dir=str(tmp_path / "run"))
    trainer = alone(mlp(), config, vector_data(), quiet=False)

    with pytest.raises(ConfigError, match=r"^step: the run is over after 2 steps"):
        [trainer.step() for _ in range(3)]

    assert saved_steps(tmp_path / "run" / "checkpoints") == [2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_closed_trainer_trains_no_more_and_still_has_its_model(
    ranks: int, tmp_path: Path
) -> None:
    config = tiny_config(
        layout={"g_inter": ranks},
        train={"steps": 4, "eval_steps": 1},
        run_dir=str(tmp_path / "run"),
    )
    data = Datasets(vector_data(), vector_data())

    def closed(transport: Transport) -> None:
        trainer = build(Job(transport), mlp(), lambda: data, config)
        trainer.step()
        before, state = trainer.evaluate(), trainer.state_dict()
        trainer.close()

        refused: dict[str, Callable[[], object]]
        refused = {"step": trainer.step, "train": trainer.train, "save": trainer.save}
        refused["the loop"] = lambda: next(iter(trainer))
        for what, call in refused.items():
            with pytest.raises(ConfigError, match=f"^{what}: the trainer is closed; make another"):
                call()
        assert trainer.evaluate() == before
        assert trainer.steps_done == 1
        after, model = trainer.state_dict(), trainer.model()
        assert (state is None) == (after is None) == (model is None) == (transport.rank > 0)
        if state is not None and after is not None:
            assert_equal_tensors(after, state)
        trainer.close()

    on_ranks(ranks, closed)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [1]


LOSSES = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 0.5, 6: 0.7}


def config_of(steps: int = 6, **sections: Any) -> Config:
    keeping = {"every": 2, "keep_last": 1, "keep_best": True}
    checkpoint = {**keeping, **sections.pop("checkpoint", {})}
    train = {"steps": steps, "eval_every": 1, "eval_steps": 1}
    return tiny_config(train=train, batch=FEW_MICROBATCHES, checkpoint=checkpoint, **sections)


def train(
    run: Path, config: Config, losses: Mapping[int, float] = LOSSES, **how: Any
) -> dict[int, list[int]]:
    """Train with evaluations of these losses; which checkpoints were there after each step."""
    there: dict[int, list[int]] = {}

    def look(trainer: Trainer) -> None:
        def evaluate() -> Evaluation:
            if trainer._saver is not None:
                trainer._saver.finish()
            there[trainer.steps_done] = saved_steps(run / "checkpoints")
            trainer.last_evaluation = Evaluation(losses[trainer.steps_done])
            return trainer.last_evaluation

        vars(trainer)["evaluate"] = evaluate

    how = {"layout": (1, 1), "validation": token_data(), **how}
    ran(how.pop("layout"), config, run, look=look, **how)
    there[config.train.steps + 1] = saved_steps(run / "checkpoints")
    return there


def test_calls_leave_the_number_of_threads_and_set_it_only_where_it_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = alone(mlp(), tiny_config(), vector_data())
    threads = [trainer.config.train.threads]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)

    trainer.step()
    assert threads == [1]
    threads[:] = [3]
    trainer.step()
    assert threads == [3, 1, 3]


def test_a_run_of_one_rank_may_rest_between_two_calls_for_as_long_as_it_likes() -> None:
    others = {*threading.enumerate()}
    trainer = alone(mlp(), tiny_config(train={"steps": 3}), vector_data())
    watching: list[bool] = []

    def is_watched() -> bool:
        new = {*threading.enumerate()} - others
        return any(thread.name.startswith(THREAD) for thread in new)

    trainer.step()
    assert not is_watched()
    trainer.train(lambda *_: watching.append(is_watched()))

    assert watching == [True, True]


@pytest.mark.parametrize("ranks", [1, 2])
def test_train_goes_on_after_steps_by_hand_past_the_pruning_step(ranks: int) -> None:
    config = tiny_config(pruning={"at_step": 2}, train={"steps": 5})
    by_hand: dict[int, list[float]] = {}

    def step(trainer: Trainer) -> None:
        by_hand[trainer.rank] = [trainer.step().loss for _ in range(3)]

    expected = train_in_process(ranks, 1, mlp(), config, vector_data())
    found = train_in_process(ranks, 1, mlp(), config, vector_data(), before=step)

    for (trainer, ours), (_, theirs) in zip(found, expected, strict=True):
        assert by_hand[trainer.rank] + ours.losses == theirs.losses
        assert all(torch.equal(ours.weights[name], one) for name, one in theirs.weights.items())
        assert any(not one.all() for one in theirs.weights.values())


def test_a_predicted_peak_has_the_memory_of_expansions_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run_recorder, "resident_memory_bytes", lambda: 10**9)
    config = tiny_config(samo={"weights": "sparse"})
    trainer = alone(tiny_gpt(config), config, token_data())

    state, predicted = trainer.state_bytes(), trainer.plan.prediction
    assert state.expanded > 0
    assert predicted is not None
    beside = 10**9 - state.total + SMALL_BLOCKS
    assert trainer.recorder.run.predicted_memory_bytes == predicted.memory_bytes + beside


def test_the_best_stays_until_another_is_better(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = train(tmp_path, config_of(), layout=(2, 2))

    # An evaluation sees what was saved up to the step before. Beside the newest and the best one
    # stays the newest that a step has trained on.
    assert there == {1: [], 2: [1], 3: [2, 1], 4: [2, 1], 5: [4, 2], 6: [5, 4], 7: [6, 5]}
    said = f"lowest validation loss 0.5000 after step 5, kept in {tmp_path}/checkpoints/step-5"
    assert said in capsys.readouterr().out


def test_the_best_is_found_without_other_checkpoints_and_has_the_weights_of_then(
    tmp_path: Path,
) -> None:
    train(tmp_path / "a", config_of(5, checkpoint={"every": 0}))
    losses = {**LOSSES, 5: 9.0}
    train(tmp_path / "c", config_of(5, checkpoint={"every": 1}), losses)

    assert saved_steps(tmp_path / "a" / "checkpoints") == [5, 2]
    best, newest = ax.load(tmp_path / "c", step="best"), ax.load(tmp_path / "c")
    second = ax.load(tmp_path / "c", step=2)
    assert_equal_tensors(best, second)
    assert not all(torch.equal(best[name], newest[name]) for name in best)


def test_the_best_survives_a_stop_and_what_comes_after(tmp_path: Path) -> None:
    train(tmp_path, config_of(), stop_after=3)
    assert saved_steps(tmp_path / "checkpoints") == [3, 2]

    there = train(tmp_path, config_of(), {**LOSSES, 5: 1.5, 6: 1.2}, resume="auto")

    assert there[7] == [6, 4, 2]


@pytest.mark.parametrize("other", ["validation data", "eval_steps"])
def test_the_best_over_other_validation_data_counts_no_more(
    other: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, validation = config_of(), token_data()
    train(tmp_path, config, stop_after=3)
    if other == "eval_steps":
        config = config.with_values({"train.eval_steps": 2})
    else:
        validation = dataclasses.replace(validation, fingerprint="1")

    losses = {3: 9.0, 4: 9.0, 5: 7.0, 6: 8.0}
    there = train(tmp_path, config, losses, resume="auto", validation=validation)

    assert there[7] == [6, 5]
    said = "the evaluation after step 2, the best one so far, was over other validation data or"
    assert capsys.readouterr().out.count(said) == 1


def test_another_run_directory_does_not_have_the_best_of_the_first(tmp_path: Path) -> None:
    train(tmp_path / "a", config_of(), stop_after=3)
    first = str(tmp_path / "a" / "checkpoints" / "step-3")

    train(tmp_path / "b", config_of(), {**LOSSES, 5: 1.5, 6: 1.7}, resume=first)

    assert saved_steps(tmp_path / "b" / "checkpoints") == [6, 5]
    train(tmp_path / "c", config_of(checkpoint={"keep_best": False}))
    with pytest.raises(MissingInputError, match="knows of no best evaluation"):
        ax.load(tmp_path / "c", step="best")


@pytest.mark.parametrize(
    ("layout", "sections"),
    [
        ((1, 2), {"samo": {"weights": "sparse", "zero_stage": 3}}),
        ((1, 1, 2), {"layout": {"g_tensor": 2}}),
    ],
    ids=["gathers", "tensor parallelism"],
)
def test_ranks_that_wait_for_each_other_in_a_layer_send_meanwhile(
    layout: tuple[int, int] | tuple[int, int, int],
    sections: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What one of them waits for may need a message of the other to another stage."""
    callers = set()

    def push(_: WorldLink) -> None:
        callers.add(sys._getframe(1).f_code.co_name)

    monkeypatch.setattr(WorldLink, "push", push)

    ran(layout, tiny_config(**sections), tmp_path / "run", order=3)

    assert wait.__name__ in callers


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_line_of_a_label_beyond_the_classes_names_the_samples(evaluates: bool) -> None:
    right, wrong = vector_data(8), vector_data(8, classes=9)
    sections = {"batch": {"global_batch_size": 8, "microbatch_size": 1}, "train": {"eval_steps": 1}}
    data = (right, wrong) if evaluates else (wrong, right)
    trainer = alone(mlp(), tiny_config(**sections), *data)

    with pytest.raises(IndexError) as failure:
        _ = trainer.evaluate() if evaluates else trainer.step()

    said = re.fullmatch(
        r"loss: samples (\d): IndexError: Target (\d) is out of bounds.",
        _describe(failure.value)[1],
    )
    assert said is not None
    assert wrong.read(np.array([int(said[1])]))[-1].tolist() == [int(said[2])]
