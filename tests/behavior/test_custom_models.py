"""Custom models: tuples, integers, tensors without gradient, odd stages; as in 1×1."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.cases import judge_everywhere
from support.exhaustive import by_default
from support.mpirun import run_alone, run_mpirun
from support.oracle import Trace
from support.runs import (
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
from axsparse.runtime.errors import ConfigError, TrainingError
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.training.trainer import build

WIDTH = 16


class Begin(nn.Module):
    """Passes on activations, the samples' classes as integers and a mask without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x), (x.detach() > 0).sum(dim=1), x.detach().abs()


class Middle(nn.Module):
    """Uses all three; the skipped activation crosses the stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(WIDTH + 1, WIDTH)

    def forward(self, x: Tensor, count: Tensor, size: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.tanh(self.linear(x)) * size + x + self.table(count), count, size


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, count: Tensor, size: Tensor) -> Tensor:
        out: Tensor = self.linear(x * size)
        return out


def linear(inputs: int = WIDTH, outputs: int = WIDTH) -> Layer:
    return Layer(f"linear{inputs}x{outputs}", partial(nn.Linear, inputs, outputs))


def small_config(**sections: object) -> Config:
    defaults = {
        "batch": {"global_batch_size": 12, "microbatch_size": 3},
        "train": {"steps": 4},
    }
    return tiny_config(**{**defaults, **sections})


def assert_same_in_all_pipelines(model: Model) -> Trace:
    """Returns the trace of the last stage."""
    settings = {"batch": {"global_batch_size": 12, "microbatch_size": 3}, "train": {"steps": 4}}
    return judge_everywhere(model, vector_data(), settings, recomputed=[0])[-1]


def test_tuples_integers_and_tensors_without_gradient_cross_stages() -> None:
    middles = [Layer(f"middle{i}", Middle, init=random_init) for i in range(2)]
    ends = [Layer(name, build, init=random_init) for name, build in (("in", Begin), ("out", End))]

    trace = assert_same_in_all_pipelines(Model([ends[0], *middles, ends[1]], summed_loss))

    assert len(set(trace.losses)) == 4


class PartlyFrozen(nn.Module):
    """One frozen matrix, one that no forward uses, one that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)
        self.unused = nn.ModuleList(nn.Linear(WIDTH, 5) for _ in range(9))
        self.used = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(torch.tanh(self.frozen(x)))
        return out


def test_frozen_parameters_stay_and_unused_ones_wait_for_nobody(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = Model([linear(), Layer("partly", PartlyFrozen)], summed_loss)
    config = small_config(optimizer={"weight_decay": 0.0})
    ranks = train_in_process(2, 2, model, config, vector_data())

    names = {name for _, trace in ranks for name in trace.weights}
    assert "partly.frozen.weight" not in names
    assert "partly.unused.0.weight" in names
    warnings = [line for line in capfd.readouterr().err.splitlines() if "warning" in line]
    (warning,) = warnings  # once, from one replica
    told = "its microbatches of step 1 gave no gradient to partly.unused.0.weight, partly.unused.0"
    assert f"rank 1 (stage 1, replica 0): {told}.bias, " in warning
    assert " and 14 more; it counts as zero" in warning
    for trainer, _ in ranks:
        for layer in trainer.layers:
            if layer.spec.name == "partly":
                frozen = layer.module.get_parameter("frozen.weight")
                assert frozen.abs().sum() > 0
                assert not frozen.requires_grad


class PaddedDataset(ArrayDataset):
    """Labels below zero do not count, so that samples have none or one target."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        super().__init__(inputs, targets)
        self.targets_per_sample = None

    def count_targets(self, targets: Tensor) -> int:
        return int((targets >= 0).sum())


def test_padded_labels_are_averaged_over_the_targets_of_the_whole_step() -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(24, WIDTH, generator=generator)
    targets = torch.randint(-3, 5, (24,), generator=generator).clamp(min=-1)

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits, labels, ignore_index=-1, reduction="sum")

    model = Model([linear(), linear(WIDTH, 5)], loss)
    config = small_config(batch={"global_batch_size": 24, "microbatch_size": 2})
    data = PaddedDataset(inputs, targets)
    [(_, one)] = train_in_process(1, 1, model, config, data)

    ranks = train_in_process(2, 3, model, config, data)

    for _, trace in ranks:
        assert trace.losses == pytest.approx(one.losses, rel=2e-5)
    counted = int((targets >= 0).sum())
    assert 0 < counted < 24
    assert one.losses[0] == pytest.approx(
        _untrained_loss(model, config, inputs, targets) / counted, rel=1e-5
    )


def _untrained_loss(model: Model, config: Config, inputs: Tensor, targets: Tensor) -> float:
    """Summed loss of the initial pruned weights, computed layer by layer outside the engine."""
    still = config.model_copy(
        update={
            "optimizer": config.optimizer.model_copy(update={"learning_rate": 1e-30}),
            "train": config.train.model_copy(update={"steps": 1}),
        }
    )
    [(trainer, _)] = train_in_process(1, 1, model, still, ArrayDataset(inputs, targets))
    x = inputs
    for layer in trainer.layers:
        x = layer.module(x)
    return float(model.loss(x, targets).detach())


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), x


class Flat(Both):
    """Tokens of all samples in one dimension, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x.view(-1, 4)), x.square().mean()


def tokens_and_scalar(reduction: str) -> LossFunction:
    def loss(logits: Tensor, scalar: Tensor, words: Tensor) -> Tensor:
        return F.cross_entropy(logits, words.flatten(), reduction=reduction) + scalar

    return loss


IS_MEAN = "loss: the same sample twice costs as much as once"


@pytest.mark.parametrize("ranks", by_default([1], [1, 4]))
def test_the_example_trains(ranks: int, tmp_path: Path) -> None:
    """One rank needs no mpirun."""
    example = Path(__file__).parents[2] / "examples" / "custom_model.py"

    start = run_alone if ranks == 1 else partial(run_mpirun, ranks)
    done = start([str(example)], cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert ranks > 1 or "1 rank = 1 stage × 1 replica" in done.stdout
    final = [line for line in done.stdout.splitlines() if "step 60/60  validation loss" in line]
    assert float(final[0].split()[4]) < 1.3 < 1.386  # ln 4: guessing


def for_three(logits: Tensor, scalar: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(12, 5), words.flatten(), reduction="sum") + scalar


def test_a_mean_over_flattened_tokens_is_refused_and_sums_train() -> None:
    (inputs,), classes = vector_data().read(np.arange(30))
    words = ArrayDataset(inputs, classes.unsqueeze(1).repeat(1, 4))
    layers = [linear(), Layer("flat", Flat)]

    mean = Model(layers, tokens_and_scalar("mean"))

    first = small_config(train={"steps": 1, "eval_first": True, "eval_steps": 1})
    for config in (small_config(), first):
        with pytest.raises(ConfigError, match=IS_MEAN):
            train_in_process(2, 1, mean, config, words, validation=words)
    for loss in (tokens_and_scalar("sum"), for_three):  # which cannot be tried on one sample
        [(_, trace)] = train_in_process(1, 1, Model(layers, loss), small_config(), words)
        assert len(trace.losses) == 4


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
    def on_rank(rank: int) -> None:
        layers = [linear(), *[Layer(f"more{i}", nn.Tanh) for i in range(rank)], linear(WIDTH, 5)]
        model = Model(layers, summed_loss)
        job = Job(LocalTransport(world, rank))
        build(job, model, lambda: Datasets(vector_data()), small_config(), quiet=True)

    world: LocalWorld[None] = LocalWorld(2)
    with pytest.raises(ConfigError, match=r"layers: rank 1 on host .* has linear16x16, more0, lin"):
        world.run(on_rank)


@pytest.mark.parametrize(
    ("by_a_callback", "off"),
    [(True, torch.no_grad), (False, torch.no_grad), (False, torch.inference_mode)],
)
def test_a_run_has_gradients_though_they_were_switched_off(
    by_a_callback: bool, off: type[torch.no_grad | torch.inference_mode]
) -> None:
    def losses(*, is_off: bool) -> list[float]:
        found: list[float] = []
        config, job = small_config(), Job(LocalTransport(LocalWorld[None](1), 0))
        model = Model([linear(), linear(WIDTH, 5)], summed_loss)

        def on_step(step: int, verdict: StepResult) -> None:
            found.append(verdict.loss)
            if is_off and by_a_callback:
                torch.set_grad_enabled(False)

        with off() if is_off and not by_a_callback else nullcontext():
            trainer = build(job, model, lambda: Datasets(vector_data()), config, quiet=True)
            trainer.train(on_step)
        return found

    expected = losses(is_off=False)

    assert losses(is_off=True) == expected
    assert len(set(expected)) == 4 and torch.is_grad_enabled()
