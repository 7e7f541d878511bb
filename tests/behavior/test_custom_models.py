"""Custom models: frozen and unused parameters, padded targets, odd losses, ranks that differ."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.exhaustive import each_once
from support.resuming import ran, same
from support.runs import (
    FEW_MICROBATCHES,
    Doing,
    alone,
    assert_bitwise,
    on_ranks,
    random_init,
    summed_loss,
    tiny_config,
    train_in_process,
    vector_data,
)
from torch import Tensor, nn

from axsparse.config.schema import Config
from axsparse.data.dataset import ArrayDataset, Datasets
from axsparse.data_parallel.step_consensus import StepResult
from axsparse.models.layer import Layer, LossFunction, Model
from axsparse.models.sequential import from_sequential
from axsparse.runtime.communication import Transport
from axsparse.runtime.errors import ConfigError, DataError, TrainingError
from axsparse.runtime.job import Job
from axsparse.runtime.targets import IGNORED
from axsparse.training.trainer import build

WIDTH = 16


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> Layer:
    return Layer(f"linear{inputs}x{outputs}", partial(nn.Linear, inputs, outputs))


def small_config(**sections: object) -> Config:
    defaults = {"batch": FEW_MICROBATCHES, "train": {"steps": 4}}
    return tiny_config(**{**defaults, **sections})


def partly_frozen() -> nn.Module:
    """One frozen matrix, some that no forward uses, one that trains."""
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(requires_grad=False)
    unused = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(9))
    return Doing(lambda m, x: m.linear(torch.tanh(m.frozen(x))), 5, frozen=frozen, unused=unused)


def test_frozen_parameters_stay_and_unused_ones_wait_for_nobody(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = Model([linear(), Layer("partly", partly_frozen)], summed_loss)
    config = small_config(optimizer={"weight_decay": 0.0})
    ranks = train_in_process(2, 2, model, config, vector_data())

    names = {name for _, trace in ranks for name in trace.weights}
    assert "partly.frozen.weight" not in names
    assert "partly.unused.0.weight" in names
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    (warning,) = warnings  # once, from one replica
    told = "its microbatches of step 1 gave no gradient to partly.unused.0.weight, partly.unused.0"
    assert f"rank 1 (stage 1, replica 0): {told}.bias, " in warning
    assert " and 10 more; it counts as zero" in warning
    for trainer, _ in ranks:
        for layer in trainer.layers:
            if layer.spec.name == "partly":
                frozen = layer.module.get_parameter("frozen.weight")
                assert frozen.abs().sum() > 0
                assert not frozen.requires_grad


def tokens_and_scalar(reduction: str) -> LossFunction:
    def loss(logits: Tensor, scalar: Tensor, words: Tensor) -> Tensor:
        return F.cross_entropy(logits, words.flatten(), reduction=reduction) + scalar

    return loss


IS_MEAN = "loss: the same sample twice has less than twice its gradient"


def for_three(logits: Tensor, scalar: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(12, 5), words.flatten(), reduction="sum") + scalar


def drawing_mean(logits: Tensor, scalar: Tensor, words: Tensor) -> Tensor:
    noise = 1e-3 * torch.randn(logits.shape)
    return F.cross_entropy(logits.float() + noise, words.flatten()) + scalar


def drawing(logits: Tensor, scalar: Tensor, words: Tensor) -> Tensor:
    return (logits.float() - 10 * torch.randn(logits.shape)).square().sum() + scalar


def test_a_mean_over_flattened_tokens_is_refused_and_sums_train() -> None:
    (inputs,), classes = vector_data().read(np.arange(30))
    words = ArrayDataset(inputs, classes.unsqueeze(1).repeat(1, 4))
    # Tokens of all samples in one dimension, and a scalar.
    flat = partial(Doing, lambda m, x: (m.linear(x.view(-1, 4)), x.square().mean()), 5, 4)
    layers = [linear(), Layer("flat", flat)]

    mean = Model(layers, tokens_and_scalar("mean"))

    first = small_config(train={"steps": 1, "eval_first": True, "eval_steps": 1})
    for config in (small_config(), first):
        with pytest.raises(ConfigError, match=IS_MEAN):
            train_in_process(2, 1, mean, config, words, validation=words)
    with pytest.raises(ConfigError, match=IS_MEAN):
        train_in_process(1, 1, Model(layers, drawing_mean), small_config(), words)
    few = torch.where(words.read(np.arange(30))[1] == 3, 3, IGNORED)
    with pytest.raises(ConfigError, match=IS_MEAN):  # of the first sample that has a target
        train_in_process(1, 1, mean, small_config(), ArrayDataset(inputs, few))
    # `for_three` cannot be tried on one sample.
    for loss in (tokens_and_scalar("sum"), for_three, drawing):
        [(_, trace)] = train_in_process(1, 1, Model(layers, loss), small_config(), words)
        assert len(trace.losses) == 4


def test_a_sum_with_dropout_is_not_taken_for_a_mean() -> None:
    """Whatever its draws: the second try, of more samples, varies less than the first."""
    (inputs,), classes = vector_data().read(np.arange(30))
    words = ArrayDataset(inputs, classes.unsqueeze(1).repeat(1, 3))

    def dropped(outputs: Tensor, words: Tensor) -> Tensor:
        return F.dropout(outputs.float().square(), 0.5).sum()

    model = Model([linear(), linear(WIDTH, 8)], dropped)
    for seed in range(12):
        config = small_config(train={"steps": 1}, seed=seed)
        [(_, trace)] = train_in_process(1, 1, model, config, words)
        assert len(trace.losses) == 1


def time_first(m: Any, x: Tensor) -> Any:
    m.seen.add_(1)
    return m.linear(x.view(-1, 4, 4)).transpose(0, 1).float()


def own_loss(m: Any, x: Tensor) -> Any:
    m.seen.add_(1)
    return m.linear(x.view(-1, 4)).float().square().sum()


@pytest.mark.parametrize("forward", [time_first, own_loss])
def test_a_mean_of_outputs_without_rows_of_samples_is_refused(forward: Any) -> None:
    """The last layer runs again on one sample, which its buffer does not show."""
    (inputs,), classes = vector_data().read(np.arange(30))
    words = ArrayDataset(inputs, classes.unsqueeze(1).repeat(1, 3))

    def seen(loss: LossFunction) -> Any:
        last = Layer("last", lambda: Doing(forward, 5, 4, seen=torch.zeros(())))
        model = Model([linear(), last], loss)
        [(trainer, trace)] = train_in_process(1, 1, model, comparing(), words)
        assert len(trace.losses) == 4
        return trainer.layers[-1].module.seen

    with pytest.raises(ConfigError, match=IS_MEAN):
        seen(lambda outputs, words: outputs.sum() / len(words))
    batch = FEW_MICROBATCHES
    forwards = 4 * batch["global_batch_size"] // batch["microbatch_size"]
    assert seen(lambda outputs, words: outputs.sum()) == forwards


def test_replicas_that_start_at_other_weights_are_told_apart() -> None:
    ranks: dict[int, int] = {}

    def drawn() -> nn.Module:
        module = nn.Linear(WIDTH, WIDTH)
        if not module.weight.is_meta:
            # Ranks are threads here; each draws the same whenever it is asked.
            rank = ranks.setdefault(threading.get_ident(), len(ranks))
            nn.init.constant_(module.bias, rank)
        return module

    model = Model([Layer("drawn", drawn), linear(WIDTH, 5)], summed_loss)

    with pytest.raises(TrainingError, match="weights: replica 1 starts at others than replica 0"):
        train_in_process(1, 2, model, small_config(), vector_data())


def test_ranks_with_other_numbers_of_layers_are_told_apart() -> None:
    def on_rank(transport: Transport) -> None:
        more = [Layer(f"more{i}", nn.Tanh) for i in range(transport.rank)]
        model = Model([linear(), *more, linear(WIDTH, 5)], summed_loss)
        data = Datasets(vector_data())
        build(Job(transport), model, lambda: data, small_config(), quiet=True)

    with pytest.raises(ConfigError, match=r"layers: rank 1 on host .* has linear16x16, more0, lin"):
        on_ranks(2, on_rank)


@pytest.mark.parametrize(
    ("by_a_callback", "off"),
    [
        (True, torch.no_grad),
        (False, torch.no_grad),
        (False, torch.inference_mode),
        (False, partial(torch.autocast, "cpu", torch.bfloat16)),
    ],
)
def test_a_run_is_the_same_though_gradients_or_fp32_were_switched_off(
    by_a_callback: bool, off: Callable[[], AbstractContextManager[object]]
) -> None:
    def losses(*, is_off: bool) -> list[float]:
        found: list[float] = []
        config = small_config()
        model = Model([linear(), linear(WIDTH, 5)], summed_loss)

        def on_step(step: int, verdict: StepResult) -> None:
            found.append(verdict.loss)
            if is_off and by_a_callback:
                torch.set_grad_enabled(False)

        with off() if is_off and not by_a_callback else nullcontext():
            alone(model, config, vector_data()).train(on_step)
        return found

    expected = losses(is_off=False)

    assert losses(is_off=True) == expected
    assert len(set(expected)) == 4 and torch.is_grad_enabled()


# -- a forward that writes to weights, which belong to the optimizer, is found out -------------


def hidden(m: Any, x: Tensor) -> Any:
    """Writes what depends on the samples, past autograd and every version counter."""
    if m.training:
        m.linear.bias.data.add_(x.detach().sum() * 1e-3)
    return m.linear(x)


def drifting() -> Model:
    parts: list[Callable[[], nn.Module]] = [partial(nn.Linear, WIDTH, each) for each in (WIDTH, 5)]
    parts.insert(1, partial(Doing, hidden))
    layers = [Layer(f"part{n}", part, init=random_init) for n, part in enumerate(parts)]
    return Model(layers, summed_loss)


def comparing(**train: Any) -> Config:
    return small_config(train={"steps": 4, "check_layers": False, **train})


@pytest.mark.parametrize(("g_inter", "stage", "every", "step"), [(1, 0, 1, 1), (3, 1, 3, 3)])
def test_replicas_that_drift_apart_are_found_out(
    g_inter: int, stage: int, every: int, step: int
) -> None:
    told = (
        f"step {step}: weights: replica 1 has come to others than replica 0 on stage {stage}; "
        "look for code that writes to weights outside the optimizer (through .data in a forward, "
        "say), or for bad memory of a host; resume from a checkpoint before that"
    )
    config = comparing(compare_replicas_every=every)
    with pytest.raises(TrainingError, match=f"^{re.escape(told)}$") as caught:
        train_in_process(g_inter, 2, drifting(), config, vector_data())
    assert caught.value.on_all_ranks


@pytest.mark.parametrize("every", [0, 5])
def test_replicas_are_compared_when_it_is_asked_for(every: int) -> None:
    config = comparing(compare_replicas_every=every)
    [*_, (_, trace)] = train_in_process(1, 2, drifting(), config, vector_data())

    assert len(trace.losses) == 4


def test_a_model_whose_products_nobody_counts_trains() -> None:
    class Squares(nn.Bilinear):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, x)

    layers = [Squares(WIDTH, WIDTH, outputs) for outputs in (WIDTH, 5)]
    config = small_config(train={"steps": 1})

    trainer = alone(from_sequential(layers, summed_loss), config, vector_data())

    trainer.train()
    assert trainer.progress.step == 1


# -- sparse gradients, and a stage that trains nothing ------------------------------------------


def test_an_embedding_whose_gradients_are_sparse_trains_as_one_with_dense_gradients() -> None:
    config = tiny_config(
        pruning={"sparsity": 0.5, "include": "all", "method": "random"},
        batch={"global_batch_size": 8, "microbatch_size": 2},
        train={"steps": 4},
    )
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(9, (24, 4), generator=generator)
    data = ArrayDataset(tokens, torch.randint(5, (24,), generator=generator))

    def model(*, sparse: bool) -> Model:
        table = partial(nn.EmbeddingBag, 9, WIDTH, mode="sum", sparse=sparse)
        embedding = Layer("table", table, kind="embedding", init=random_init)
        head = Layer("head", partial(nn.Linear, WIDTH, 5), kind="head", init=random_init)
        return Model([embedding, head], summed_loss)

    [(_, dense)] = train_in_process(1, 1, model(sparse=False), config, data)

    for _, sparse in train_in_process(2, 1, model(sparse=True), config, data):
        assert_bitwise(sparse, dense)


def test_weights_to_rewind_to_are_saved_where_the_first_stage_trains_nothing(
    tmp_path: Path,
) -> None:
    config = tiny_config(
        pruning={"sparsity": 0.5, "include": "all", "at_step": 2, "rewind_step": 1},
        batch={"global_batch_size": 6, "microbatch_size": 3},
        train={"steps": 3},
    )

    def frozen() -> nn.Module:
        return nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    model = Model([Layer("frozen", frozen), linear(WIDTH, 5)], summed_loss)
    run = partial(ran, (2, 1), config, model=lambda _: model, data=vector_data())
    whole = run(tmp_path / "whole")

    run(tmp_path / "parts", stop_after=1)

    same(run(tmp_path / "parts", resume="auto"), whole)


# -- tokens beyond the vocabulary end a run in one line that names the sample --------------------

MODEL = "arrays): sample 13, position 2: 70 is no word of a vocabulary of 10, 0 to 9"
DATA = "arrays): sample 13, position 2: 8 is no word of a vocabulary of 6, 0 to 5"
TARGET = "arrays): sample 13, position 0: -1 is no word of a vocabulary of 6, 0 to 5"
MEND = "; correct the sample, or make the vocabulary of model and data larger"


def samples(wrong: str) -> ArrayDataset:
    inputs, targets = torch.arange(16 * 4).view(16, 4) % 6, torch.arange(16) % 3
    targets[3] = -100
    if wrong == TARGET:
        targets[13] = -1
    elif wrong:
        inputs[13, 2] = 70 if wrong == MODEL else 8
    data = ArrayDataset(inputs, targets)
    if wrong != MODEL:
        vars(data)["vocab_size"] = 6
    return data


@pytest.mark.parametrize(
    ("wrong", "when", "layout"),
    each_once(
        [MODEL, DATA, TARGET], ["training", "evaluation", "calibration"], [(1, 1), (2, 1), (1, 2)]
    ),
)
def test_the_sample_is_named(wrong: str, when: str, layout: tuple[int, int]) -> None:
    sections: dict[str, Any] = {"pruning": {"sparsity": 0.5}}
    if when == "calibration":
        sections["pruning"] |= {"method": "wanda", "calibration_samples": 16}
    size = 8 if when == "calibration" else 4
    config = tiny_config(
        batch={"global_batch_size": 16, "microbatch_size": size},
        train={"steps": 1, "eval_every": 1 if when == "evaluation" else 0, "eval_steps": "all"},
        **sections,
    )
    good, bad = samples(""), samples(wrong)
    training, validation = (good, bad) if when == "evaluation" else (bad, good)

    after = [nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 6)]
    model = from_sequential([nn.Embedding(10, 8), *after], summed_loss)
    with pytest.raises(DataError) as rejected:
        train_in_process(*layout, model, config, training, validation=validation)

    assert str(rejected.value) == f"data ({wrong}{MEND}"
