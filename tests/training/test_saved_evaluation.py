"""The model of a checkpoint evaluates to what its run reported."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hf import SMALL_LLAMA
from support.resuming import ran
from support.runs import job_alone, mlp, tiny_config, tiny_gpt, token_data, vector_data

from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets
from axsparse.models.layer import Model
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError
from axsparse.training.evaluation import Evaluation
from axsparse.training.saved_model import evaluate_saved, open_saved_model
from axsparse.training.trainer import Trainer, build

TRAIN = {"steps": 3, "eval_every": 3, "eval_steps": "all"}


def named(config: Config) -> Model:
    return named_model(config.with_origins("tiny", {}))


def reported(
    layout: tuple[int, int], config: Config, path: Path, datasets: Datasets
) -> Evaluation | None:
    """The last evaluation that a run reports."""
    looked: list[Trainer] = []
    ran(
        layout,
        config,
        path,
        model=named,
        data=datasets.training,
        validation=datasets.validation,
        look=looked.append,
    )
    return looked[0].last_evaluation


@pytest.mark.parametrize(
    ("layout", "changed"),
    [
        pytest.param((2, 2), {"precision": "fp32"}, id="gpt fp32 2x2"),
        pytest.param(
            *((1, 1), {"precision": "bf16", "model": {"tie_embeddings": False}}),
            id="gpt bf16 untied",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param((2, 1), {"precision": "bf16", "model": SMALL_LLAMA}, id="llama bf16"),
    ],
)
def test_texts_have_the_loss_that_the_run_reported(
    layout: tuple[int, int], changed: dict[str, object], tmp_path: Path
) -> None:
    config = tiny_config(train=TRAIN, **changed)
    datasets = Datasets(token_data(), token_data(samples=31))
    said = reported(layout, config, tmp_path / "run", datasets)

    saved = open_saved_model(tmp_path / "run", None, trained=True)
    progress: list[tuple[int, int]] = []
    found = evaluate_saved(saved, datasets, "all", lambda *batches: progress.append(batches))

    assert found == said
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert found.samples == found.available == 31
    assert evaluate_saved(saved, datasets, 1).samples == 12


def test_other_data_and_models_of_ones_own_are_refused(tmp_path: Path) -> None:
    config, run = tiny_config(train={"steps": 1}), tmp_path / "run"
    ran((1, 1), config, run, model=tiny_gpt)
    saved = open_saved_model(run, 1, trained=True)
    with pytest.raises(DataError, match="data: random has samples 39, checkpoint"):
        evaluate_saved(saved, Datasets(token_data(39), token_data()), "all")
    with pytest.raises(ConfigError, match="evaluate: random has no validation data"):
        evaluate_saved(saved, Datasets(token_data()), "all")
    with pytest.raises(MissingInputError, match="has no checkpoint of step 7"):
        open_saved_model(run, 7, trained=True)

    ran((1, 1), config, tmp_path / "own", model=lambda _: mlp(), data=vector_data())
    with pytest.raises(ConfigError, match="is of a model of your own, not of the gpt of its conf"):
        open_saved_model(tmp_path / "own", None, trained=True)
    # As the message says.
    train = config.train.model_copy(update={"eval_steps": "all"})
    again = config.model_copy(update={"train": train})
    data = Datasets(vector_data(), vector_data())
    trainer = build(job_alone(), mlp(), lambda: data, again, resume=str(tmp_path / "own"))
    found = trainer.evaluate()
    assert found is not None and trainer.steps_done == 1
    trainer.close()
