"""Loss and metrics of validation data: exact, the same in every layout, and without a trace."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.hf import SMALL_LLAMA
from support.resuming import ran, records_of
from support.runs import (
    alone,
    mlp,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
    vector_data,
)
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.data.dataset import Datasets
from axsparse.models.layer import MetricFunction, Model, count_top1
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.errors import ConfigError, DataError, MissingInputError
from axsparse.runtime.exchange import exact_sum
from axsparse.training.evaluation import Evaluation, evaluate_saved, open_saved_model
from axsparse.training.trainer import Trainer

TRAINING, VALIDATION = vector_data(), vector_data(samples=29)
TOP1: Mapping[str, MetricFunction] = {"top1": count_top1}


def classifier(metrics: Mapping[str, MetricFunction] = TOP1) -> Model:
    model = mlp()
    return Model(model.layers, model.loss, name="mlp", metrics=metrics)


def settings_of(**train: object) -> Config:
    """29 samples in batches of 12: two full ones, and five samples."""
    return tiny_config(
        batch={"global_batch_size": 12, "microbatch_size": 2},
        train={"steps": 4, "eval_every": 2, "eval_steps": 9, **train},
    )


@pytest.mark.parametrize(("steps", "samples"), [(1, 12), (2, 24), (9, 29), ("all", 29)])
def test_an_evaluation_says_how_much_it_has_seen_and_can_be_repeated(
    steps: object, samples: int
) -> None:
    config = settings_of(eval_steps=steps, steps=1)
    ranks = train_in_process(1, 1, classifier(), config, TRAINING, validation=VALIDATION)
    trainer = ranks[0][0]
    last = trainer.last_evaluation

    assert last is not None
    assert (last.samples, last.available) == (samples, 29)
    trainer.close()
    assert trainer.evaluate() == last


@pytest.mark.parametrize("library", ["torch", "numpy", "random"])
def test_a_metric_that_draws_or_counts_is_not_taken_for_a_mean(library: str) -> None:
    draw: Any = {
        "torch": torch.rand,
        "numpy": np.random.rand,
        "random": lambda number: [random.random() for _ in range(number)],  # noqa: S311
    }[library]

    def lucky(logits: Tensor, targets: Tensor) -> Tensor:
        return (torch.as_tensor(draw(len(targets))) > 0.5).float().sum()

    metrics = {f"lucky{number}": lucky for number in range(7)}  # which seeds follow
    model = classifier({**metrics, "best": lambda logits, _: (logits == logits.max()).any().sum()})
    [(trainer, _)] = train_in_process(
        1, 1, model, settings_of(steps=1), TRAINING, validation=VALIDATION
    )

    assert trainer.last_evaluation is not None
    assert len(trainer.last_evaluation.metrics) == 8


def test_a_metric_is_tried_again_while_it_is_zero() -> None:
    _, first = VALIDATION.read(np.array([0]))

    def others(logits: Tensor, targets: Tensor) -> Tensor:
        return (targets != first).float().mean()

    with pytest.raises(ConfigError, match="metric others: the same for one sample"):
        train_in_process(
            1, 1, classifier({"others": others}), settings_of(), TRAINING, validation=VALIDATION
        )


def test_metrics_and_loss_are_means_over_the_targets() -> None:
    config = settings_of(steps=1)
    ranks = train_in_process(1, 1, classifier(), config, TRAINING, validation=VALIDATION)
    trainer = ranks[0][0]

    (inputs,), targets = VALIDATION.read(np.arange(29))
    outputs = inputs
    with torch.no_grad():
        for layer in trainer.layers:
            outputs = layer.module(outputs)
    right = int((outputs.argmax(dim=1) == targets).sum())

    found = trainer.last_evaluation
    assert found is not None
    assert found.metrics == {"top1": right / 29}
    assert 0 < right < 29
    assert found.loss == pytest.approx(float(F.cross_entropy(outputs.double(), targets)), rel=1e-6)


def probability(logits: Tensor, targets: Tensor) -> Tensor:
    """Fractions, whose fp64 sum depends on their order if it is rounded each time."""
    return logits.double().softmax(dim=1).gather(1, targets[:, None]).sum()


def test_an_evaluation_is_bitwise_the_same_in_every_layout() -> None:
    # Exact sums, so that the weights that are evaluated are the same.
    config = settings_of(steps=1)
    config = config.with_values({"samo.gradient": "exact"})
    found = [
        trace.evaluation
        for layout in ((1, 1), (3, 1), (1, 3), (2, 2))
        for _, trace in train_in_process(
            *(*layout, classifier({**TOP1, "probability": probability}), config, TRAINING),
            validation=VALIDATION,
        )
    ]

    assert isinstance(found[0], Evaluation) and len(found) == 11
    assert all(other == found[0] for other in found)


def test_rank_0_writes_down_what_the_last_stage_found(tmp_path: Path) -> None:
    looked: list[Trainer] = []
    given: dict[str, Any] = {"data": TRAINING, "validation": VALIDATION, "look": looked.append}
    ran((2, 1), settings_of(), tmp_path / "run", model=lambda _: classifier(), **given)

    last = looked[0].last_evaluation
    assert last is not None
    expected = {"step": 4, "eval_loss": last.loss, "top1": last.metrics["top1"]}
    assert records_of(tmp_path / "run", "eval_loss")[-1] == expected


# -- sums


@settings(deadline=None, derandomize=True)
@example(values=[1e9, 2.0**-40], cuts=[])  # has a remainder
@given(
    values=st.lists(st.floats(min_value=-1e9, max_value=1e9, width=32), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=4),
)
def test_sums_are_exact_however_they_are_divided(values: list[float], cuts: list[int]) -> None:
    # As losses are: bits of 2⁻⁴⁰ and up, so that 106 places hold any sum.
    values = [round(value * 2**40) / 2**40 for value in values]
    bounds = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [exact_sum(values[a:b]) for a, b in itertools.pairwise(bounds)]

    for part, (a, b) in zip(parts, itertools.pairwise(bounds), strict=True):
        assert Fraction(part[0]) + Fraction(part[1]) == sum(map(Fraction, values[a:b]))
    total, _ = exact_sum([term for part in parts for term in part])
    assert total == float(sum(map(Fraction, values)))


def test_top1_counts_samples_whose_class_has_the_largest_logit() -> None:
    logits = torch.tensor(
        [[0.0, 2.0, 1.0], [5.0, 2.0, 1.0], [math.nan, 9.0, 0.0], [-math.inf, -math.inf, 3.0]]
    )

    assert count_top1(logits, torch.tensor([1, 1, 0, 2])).item() == 2
    assert count_top1(logits, torch.tensor([1, 0, 1, 0])).item() == 2
    # A padded target is no class.
    assert count_top1(logits, torch.full((4,), -100)).item() == 0


TRAIN = {"steps": 3, "eval_every": 3, "eval_steps": "all"}


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
    looked: list[Trainer] = []
    ran(
        layout,
        config,
        tmp_path / "run",
        model=lambda config: named_model(config.with_origins("tiny", {})),
        data=datasets.training,
        validation=datasets.validation,
        look=looked.append,
    )

    saved = open_saved_model(tmp_path / "run", None)
    progress: list[tuple[int, int]] = []
    found = evaluate_saved(saved, datasets, "all", lambda *batches: progress.append(batches))

    assert found == looked[0].last_evaluation
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert found.samples == found.available == 31
    assert evaluate_saved(saved, datasets, 1).samples == 12


def test_other_data_and_models_of_ones_own_are_refused(tmp_path: Path) -> None:
    config, run = tiny_config(train={"steps": 1}), tmp_path / "run"
    ran((1, 1), config, run, model=tiny_gpt)
    saved = open_saved_model(run, 1)
    with pytest.raises(DataError, match="data: random has samples 39, checkpoint"):
        evaluate_saved(saved, Datasets(token_data(39), token_data()), "all")
    with pytest.raises(ConfigError, match="has no validation data; nothing to do"):
        evaluate_saved(saved, Datasets(token_data()), "all")
    with pytest.raises(MissingInputError, match="has no checkpoint of step 7"):
        open_saved_model(run, 7)

    ran((1, 1), config, tmp_path / "own", model=lambda _: mlp(), data=vector_data())
    with pytest.raises(ConfigError, match="is of a model of your own, not of the gpt of its conf"):
        open_saved_model(tmp_path / "own", None)
    # As the message says.
    again = config.with_values({"train.eval_steps": "all"})
    resume = str(tmp_path / "own")
    trainer = alone(mlp(), again, vector_data(), vector_data(), quiet=False, resume=resume)
    found = trainer.evaluate()
    assert found is not None and trainer.steps_done == 1
    trainer.close()
