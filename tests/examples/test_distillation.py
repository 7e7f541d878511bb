"""The example that trains a pruned model towards its dense self."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from support.exhaustive import by_default
from support.hf import SMALL_LLAMA, small_llama, write_llama
from support.runs import assert_bitwise, job_alone, tiny_config, token_data, train_in_process
from torch import Tensor

import axsparse as ax
from axsparse.config.schema import Config
from axsparse.data.order import samples_of_step
from axsparse.models.layer import Model
from axsparse.models.model_profile import profile

EXAMPLE = Path(__file__).parents[2] / "examples" / "distil.py"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("distil", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "distil", module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


class Learnt:
    """Weights of both signs, so that the teacher is no uniform guess."""

    fingerprint = "learnt"

    def __init__(self, model: Model) -> None:
        self.weights = {}
        for name, shape in profile(model).shapes.items():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            drawn = torch.randn(shape, generator=generator) / 4
            self.weights[name] = drawn if len(shape) > 1 else 1 + drawn

    def read(self, name: str) -> Tensor:
        return self.weights[name]


def pretrained(tied: bool) -> tuple[Model, dict[str, Tensor]]:
    model = small_llama(tie_word_embeddings=tied)
    start = Learnt(model)
    return replace(model, start=start), start.weights


def config(sparsity: float, tied: bool = False) -> Config:
    return tiny_config(
        model={**SMALL_LLAMA, "hf": {**SMALL_LLAMA["hf"], "tie_word_embeddings": tied}},
        batch={"global_batch_size": 4, "microbatch_size": 2},
        pruning={"sparsity": sparsity},
        optimizer={"learning_rate": 3e-3},
        train={"steps": 10, "eval_every": 10, "eval_steps": 2},
    )


@pytest.mark.parametrize("tied", by_default([True], [False, True]))
def test_the_student_learns_alike_in_every_pipeline_and_the_teacher_stays(
    example: ModuleType, tied: bool
) -> None:
    model, weights = pretrained(tied)
    taught, data = example.distilled(model), token_data(4)  # The same batch in every step.

    [(trainer, reference)] = train_in_process(1, 1, taught, config(0.6, tied), data)
    state = trainer.state_dict()

    assert reference.losses[-1] < 0.95 * reference.losses[0]
    assert all(".student." in name for name in reference.weights)
    assert state is not None
    for name, tensor in weights.items():
        assert torch.equal(state[example.with_role(model, "teacher", name)], tensor), name
        assert not torch.equal(state[example.with_role(model, "student", name)], tensor), name
    for one, trace in train_in_process(3, 1, taught, config(0.6, tied), data):
        assert trace.losses == reference.losses
        if not tied:  # a tied weight has its second use under a name of its own
            assert_bitwise(trace, reference)
        assert one.profile.ties == trainer.profile.ties


def logits_of(model: Model, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    flow: tuple[Tensor, ...] = (tokens,)
    for layer in model.layers:
        module = layer.build()
        for name, parameter in module.named_parameters():
            parameter.data.copy_(weights[f"{layer.name}.{name}"])
        outputs = module(*flow)
        flow = outputs if isinstance(outputs, tuple) else (outputs,)
    return F.linear(*flow).detach()


def test_the_loss_is_that_of_hinton_and_evaluations_have_cross_entropy_alone(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "TOKENS", 5)
    model, weights = pretrained(tied=False)
    asked, data = config(0.6), token_data()
    still = asked.model_copy(
        update={"optimizer": asked.optimizer.model_copy(update={"learning_rate": 1e-30})}
    )
    runs = train_in_process(1, 1, example.distilled(model), still, data, validation=data)
    [(trainer, trace)] = runs
    state = trainer.state_dict()
    assert state is not None
    student = {example.plain(name): w for name, w in state.items() if ".student." in name}

    def logits(samples: object) -> tuple[Tensor, Tensor, Tensor]:
        (tokens,), targets = data.read(samples)  # type: ignore[arg-type]
        own, taught = logits_of(model, student, tokens), logits_of(model, weights, tokens)
        return own.flatten(0, 1), taught.flatten(0, 1), targets.flatten()

    own, taught, targets = logits(samples_of_step(len(data), 4, 0, asked.seed))
    known, learnt = (taught / 2).softmax(-1), (own / 2).softmax(-1)
    apart = (known * (known / learnt).log()).sum(-1).mean()
    expected = 0.5 * F.cross_entropy(own, targets) + 0.5 * 2**2 * apart

    assert apart > 0.1
    assert trace.losses[0] == pytest.approx(float(expected), rel=1e-5)
    assert trainer.last_evaluation is not None
    own, _, targets = logits(torch.arange(8).numpy())
    assert trainer.last_evaluation.loss == pytest.approx(
        float(F.cross_entropy(own, targets)), rel=1e-5
    )


def test_it_leaves_a_folder_that_a_run_starts_from(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path / "dense")
    monkeypatch.chdir(tmp_path)
    data = ax.Datasets(token_data(), token_data())
    monkeypatch.setattr("axsparse.training.run_sources.open_datasets", lambda loaded: data)
    monkeypatch.setattr("axsparse.training.trainer.own_job", job_alone)
    settings = ["precision=fp32", "train.steps=2", "data.source=stdlib", "run_dir=run"]
    settings += ["batch.global_batch_size=4", "model.from=dense", "train.eval_steps=1"]
    monkeypatch.setattr(sys, "argv", ["", "prune_llama.yaml", "student", *settings])

    example.main()

    start = ax.named_model(ax.configure("prune_llama.yaml", ["model.from=student"])).start
    assert start is not None
    trained = ax.load("run")
    model = small_llama()
    for name in profile(model).shapes:
        tensor = start.read(name)
        assert tensor is not None
        assert torch.equal(tensor, trained[example.with_role(model, "student", name)]), name
        share = (tensor == 0).float().mean().item()
        is_pruned = name.startswith("model.layers") and tensor.dim() == 2
        assert share == pytest.approx(0.5 if is_pruned else 0.0, abs=0.01), name
