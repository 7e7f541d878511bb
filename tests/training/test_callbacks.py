"""Functions of the user's own in a training: when, with what, on which ranks, and if they fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support.runs import mlp, tiny_config, vector_data

from axsparse.config.load import LoadedConfig
from axsparse.data.dataset import Datasets
from axsparse.data_parallel.agreement import Verdict
from axsparse.runtime.grid import Grid
from axsparse.runtime.job import Job, _describe
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.training.build import build
from axsparse.training.callbacks import OnCheckpoint, OnEvaluation, OnStep
from axsparse.training.evaluation import Evaluation
from axsparse.training.run_training import run_training

Heard = tuple[str, int, object]


def train(
    run_dir: Path,
    ranks: int,
    callbacks: Callable[[int], tuple[OnStep, OnEvaluation, OnCheckpoint]],
) -> None:
    """Train four steps on so many stages, with the callbacks that each rank is given."""
    world: LocalWorld[None] = LocalWorld(ranks)
    config = tiny_config(
        train={"steps": 4, "eval_every": 2, "eval_steps": 1},
        checkpoint={"every": 2},
    ).model_copy(update={"run_dir": str(run_dir)})
    loaded = LoadedConfig(config, "tiny", {})
    data = Datasets(vector_data(), vector_data())

    def body(rank: int) -> None:
        job, grid = Job(LocalTransport(world, rank)), Grid(ranks, 1)
        trainer = build(job, mlp(), lambda: data, loaded, grid=grid)
        on_step, on_evaluation, on_checkpoint = callbacks(rank)
        trainer.train(on_step, on_evaluation=on_evaluation, on_checkpoint=on_checkpoint)

    world.run(body)


def test_every_rank_hears_the_same_in_the_same_order(tmp_path: Path) -> None:
    heard: list[list[Heard]] = [[], []]

    def callbacks(rank: int) -> tuple[OnStep, OnEvaluation, OnCheckpoint]:
        def on_step(step: int, verdict: Verdict) -> None:
            heard[rank].append(("step", step, verdict.loss))

        def on_evaluation(step: int, found: Evaluation) -> None:
            heard[rank].append(("evaluation", step, found.loss))

        def on_checkpoint(step: int, folder: Path) -> None:
            assert (folder / "manifest.json").is_file()
            heard[rank].append(("checkpoint", step, folder.name))

        return on_step, on_evaluation, on_checkpoint

    train(tmp_path / "run", 2, callbacks)

    assert heard[0] == heard[1]
    told = [(what, step) for what, step, _ in heard[0]]
    assert [one for one in told if one[0] != "checkpoint"] == [
        ("step", 1),
        ("step", 2),
        ("evaluation", 2),
        ("step", 3),
        ("step", 4),
        ("evaluation", 4),
    ]
    # When a thread has written the first is chance; it never comes before its evaluation.
    assert [one for one in told if one[0] == "checkpoint"] == [("checkpoint", 2), ("checkpoint", 4)]
    assert told.index(("checkpoint", 2)) > told.index(("evaluation", 2))
    assert told[-1] == ("checkpoint", 4)
    assert ("checkpoint", 2, "step-2") in heard[0]


def test_a_whole_run_passes_them_on(tmp_path: Path) -> None:
    config = tiny_config(train={"steps": 2, "eval_steps": 1}, checkpoint={"every": 1})
    loaded = LoadedConfig(config.model_copy(update={"run_dir": str(tmp_path / "run")}), "tiny", {})
    heard: list[tuple[str, int]] = []

    run_training(
        Job(LocalTransport(LocalWorld(1), 0)),
        mlp(),
        lambda: Datasets(vector_data(), vector_data()),
        loaded,
        on_step=lambda step, verdict: heard.append(("step", step)),
        on_evaluation=lambda step, found: heard.append(("evaluation", step)),
        on_checkpoint=lambda step, folder: heard.append(("checkpoint", step)),
    )

    assert sorted(heard) == [
        ("checkpoint", 1),
        ("checkpoint", 2),
        ("evaluation", 2),
        ("step", 1),
        ("step", 2),
    ]


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
    def fail(step: int, found: object) -> None:
        raise ValueError("my own mistake")

    def callbacks(rank: int) -> tuple[OnStep, OnEvaluation, OnCheckpoint]:
        del rank
        quiet: list[Callable[[int, object], None]] = [lambda step, found: None] * 3
        quiet[failing] = fail
        return quiet[0], quiet[1], quiet[2]

    with pytest.raises(ValueError, match="my own mistake") as failure:
        train(tmp_path / "run", 1, callbacks)

    assert _describe(failure.value) == (70, f"{where}: ValueError: my own mistake")
