"""A teacher is next to the trained model on every stage, and nowhere else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.exhaustive import by_default
from support.hf import SMALL_LLAMA, gpt2_folder, small_gpt, small_llama
from support.images import write_safetensors
from support.oracle import Oracle, Trace
from support.resuming import ran
from support.runs import (
    FEW_MICROBATCHES,
    VOCABULARY,
    assert_bitwise,
    tiny_config,
    tiny_gpt,
    token_data,
    train_in_process,
)
from torch import Tensor, nn

import axsparse as ax
from axsparse.config.schema import Config
from axsparse.models.losses import summed_cross_entropy
from axsparse.models.model_profile import profile
from axsparse.models.sequential import from_sequential
from axsparse.models.teacher import with_teacher
from axsparse.pipeline.engine import Engine
from axsparse.pipeline.layer_runner import LayerRunner
from axsparse.planner.cluster import load_cluster
from axsparse.planner.profiled_model import ProfiledModel
from axsparse.planner.step_cost import stage_seconds
from axsparse.runtime.errors import ConfigError, DataError
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.state_bytes import StateBytes
from axsparse.training.export import export, load
from axsparse.training.trainer import Trainer

STEPS = 4
TOLERANCE = 2e-5
"""The divergence is summed in another order than torch sums it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of weights of both signs, so that it is no uniform guess; its head is its
    embedding."""
    path = tmp_path_factory.mktemp("teachers") / "gpt2"
    path.mkdir()
    gpt2_folder(path, small_gpt())
    return path


def taught(folder: Path, **sections: Any) -> Config:
    train = {"steps": STEPS, "teacher": str(folder), **sections.pop("train", {})}
    sections = {"pruning": {"sparsity": 0.6}, "batch": FEW_MICROBATCHES, **sections}
    return tiny_config(train=train, **sections)


class PlainDistillation(Oracle):
    """Distillation as plain torch writes it, with transformers' model as the teacher."""

    def __init__(self, transformers: Any, folder: Path, config: Config) -> None:
        super().__init__(tiny_gpt(config), config, token_data())
        teacher = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        tokens: list[Tensor] = []
        self.modules[0].register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0]))
        share, warmth = config.train.distillation_weight, config.train.distillation_temperature

        def loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
            logits = F.linear(hidden, weight).flatten(0, 1)
            with torch.no_grad():
                hints = teacher(tokens.pop()).logits.flatten(0, 1)
            apart = F.kl_div(
                (logits / warmth).log_softmax(-1), (hints / warmth).softmax(-1), reduction="sum"
            )
            own = F.cross_entropy(logits, targets.flatten(), reduction="sum")
            return (1 - share) * own + share * warmth**2 * apart

        self.loss = loss


def test_a_model_that_begins_with_an_embedding_of_a_users_class_has_its_vocabulary(
    folder: Path,
) -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * 2

    modules = [Scaled(VOCABULARY, 8), nn.Linear(8, VOCABULARY)]
    model = from_sequential(modules, summed_cross_entropy)

    assert with_teacher(model, taught(folder)).teacher is not None
    with pytest.raises(ConfigError, match="a vocabulary of 64, and the model one of 63"):
        with_teacher(
            from_sequential([Scaled(63, 8), modules[1]], summed_cross_entropy), taught(folder)
        )


@pytest.mark.parametrize("tied", by_default([True], [False, True]))
@pytest.mark.parametrize(("share", "warmth"), [(1.0, 1.0), (0.3, 2.0)])
def test_a_run_is_that_of_plain_torch(
    transformers: Any, folder: Path, share: float, warmth: float, tied: bool
) -> None:
    settings = {"distillation_weight": share, "distillation_temperature": warmth}
    config = taught(folder, train=settings, model={"tie_embeddings": tied})
    expected = PlainDistillation(transformers, folder, config).run(STEPS)

    [(_, trace)] = train_in_process(1, 1, tiny_gpt(config), config, token_data())

    assert trace.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert trace.norms == pytest.approx(expected.norms, rel=TOLERANCE)
    for name, weight in expected.weights.items():
        torch.testing.assert_close(trace.weights[name], weight, rtol=0, atol=TOLERANCE)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"model": {"tie_embeddings": True}},
    "recomputed": {"pipeline": {"checkpoint_activations": 1}},
    "sparse weights": {"samo": {"weights": "sparse"}},
    "gathered weights": {"samo": {"weights": "sparse", "zero_stage": 3}},
    "exact sums": {"samo": {"gradient": "exact"}},
    "bf16": {"precision": "bf16"},
    "gradual": {"pruning": {"method": "gradual", "interval": 1, "until_step": 3}},
}


@pytest.mark.parametrize("way", by_default(["tied", "sparse weights"], [*WAYS]))
def test_every_layout_has_the_same_bits(folder: Path, way: str) -> None:
    config = taught(folder, **{"model": {"tie_embeddings": False}, **WAYS[way]})
    data = token_data()
    known: dict[int, Trace] = {}

    for g_inter, g_data in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2)):
        runs = train_in_process(g_inter, g_data, tiny_gpt(config), config, data, order=5)
        reference = known.setdefault(g_data, runs[0][1]) if g_inter == 1 else known[g_data]
        for _, trace in runs:
            assert_bitwise(trace, reference)


def other_llama(path: Path, **changed: Any) -> Path:
    """A folder of a Llama of other sizes than `SMALL_LLAMA`, with weights of both signs."""
    path.mkdir()
    generator = torch.Generator().manual_seed(4)
    shapes = profile(small_llama(**changed)).shapes
    weights = {name: torch.randn(shape, generator=generator) / 3 for name, shape in shapes.items()}
    write_safetensors(path / "model.safetensors", weights)
    (path / "config.json").write_text(json.dumps({**SMALL_LLAMA["hf"], **changed}))
    return path


@pytest.mark.parametrize("layers", by_default([5], [1, 5]))
def test_a_teacher_may_have_other_layers_and_widths(
    transformers: Any, tmp_path: Path, layers: int
) -> None:
    sizes = {"num_hidden_layers": layers, "hidden_size": 40, "intermediate_size": 20}
    config = taught(other_llama(tmp_path / "llama", **sizes))
    expected = PlainDistillation(transformers, tmp_path / "llama", config).run(STEPS)
    model, data = tiny_gpt(config), token_data()

    [(_, reference)] = train_in_process(1, 1, model, config, data)

    assert reference.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    for g_inter in (2, 4):
        runs = train_in_process(g_inter, 1, model, config, data)
        assert sum(len(trainer.teacher) for trainer, _ in runs) == layers + 3
        for _, trace in runs:
            assert trace.losses == reference.losses


def test_a_gpt2_of_another_activation_teaches_as_transformers_own(
    transformers: Any, tmp_path: Path
) -> None:
    del transformers
    gpt2_folder(tmp_path, small_gpt(), activation_function="gelu")
    config = tiny_config(train={"teacher": str(tmp_path)})

    teacher = with_teacher(tiny_gpt(config), config).teacher

    assert teacher is not None
    assert (teacher.model.name, teacher.model.layers[-1].name) == ("gpt2", "lm_head")


def test_a_program_names_a_teacher_and_saves_the_model_alone(
    transformers: Any, tmp_path: Path
) -> None:
    folder = str(other_llama(tmp_path / "llama"))
    settings: dict[str, Any] = {"pruning.sparsity": 0.5, "train.steps": 2, "precision": "fp32"}
    settings["batch.global_batch_size"] = 4
    data = token_data(), token_data()
    trainer = ax.Trainer(ax.hf(folder), data, settings, quiet=True, teacher=folder)

    trainer.train()
    trainer.save_hf(tmp_path / "out")

    assert trainer.plan.taught_from is not None
    weights = trainer.state_dict()
    assert weights is not None
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in theirs.named_parameters():
        assert torch.equal(weights[name], value), name
    gates = weights["model.layers.1.mlp.gate_proj.weight"]
    assert float((gates == 0).float().mean()) == pytest.approx(0.5, abs=0.01)


def teacher_weights(trainer: Trainer) -> dict[str, Tensor]:
    return {
        layer.spec.full_name(name): parameter.detach().clone()
        for layer in trainer.teacher
        for name, parameter in layer.module.named_parameters()
    }


def test_the_teacher_stays_as_it_is_and_is_in_no_file(folder: Path, tmp_path: Path) -> None:
    config = taught(folder, checkpoint={"every": 2})
    trainers: list[Trainer] = []

    ran((2, 1), config, tmp_path / "taught", look=trainers.append)
    ran((2, 1), taught(folder, train={"teacher": None}), tmp_path / "alone")

    teacher = with_teacher(tiny_gpt(config), config).teacher
    assert teacher is not None and teacher.model.start is not None
    assert {layer.spec.name for each in trainers for layer in each.teacher} == {
        layer.name for layer in teacher.model.layers
    }
    for trainer in trainers:
        for name, weight in teacher_weights(trainer).items():
            first = "embed.token.weight" if name == "head.weight" else name
            value = teacher.model.start.read(first)
            assert value is not None and torch.equal(weight, value), name
    runs = tmp_path / "taught", tmp_path / "alone"
    weights = [load(run) for run in runs]
    assert {name: one.shape for name, one in weights[0].items()} == {
        name: one.shape for name, one in weights[1].items()
    }
    assert not torch.equal(*(one["block0.fc1.weight"] for one in weights))
    sizes = [
        [path.stat().st_size for path in sorted((run / "checkpoints").rglob("*.safetensors"))]
        for run in runs
    ]
    assert sizes[0] == [*sizes[1], *sizes[1]], "of two checkpoints, and of one"
    bytes_of = [export(run, "hf", tmp_path / f"{run.name} hf").nbytes for run in runs]
    assert bytes_of[0] == bytes_of[1]


def test_evaluations_are_the_models_and_run_no_layer_of_the_teacher(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    evaluate = LayerRunner.evaluate
    sent: list[int] = []
    send = Engine._send

    def counting(self: LayerRunner, *given: Any) -> Any:
        calls.append(self.name)
        return evaluate(self, *given)

    def counted(self: Engine, direction: Any, number: int, tensors: Any) -> None:
        sent.append(len(tensors))
        send(self, direction, number, tensors)

    def evaluated(config: Config) -> Any:
        calls.clear()
        sent.clear()
        runs = train_in_process(
            2, 1, tiny_gpt(config), config, token_data(), validation=token_data(), before=look
        )
        return runs[0][0].last_evaluation

    def look(trainer: Trainer) -> None:
        trainer.evaluate()

    monkeypatch.setattr(LayerRunner, "evaluate", counting)
    monkeypatch.setattr(Engine, "_send", counted)
    own = {"steps": 1, "eval_steps": 1, "eval_every": 0}
    still = {"learning_rate": 1e-30}

    with_one = evaluated(taught(folder, train=own, optimizer=still))
    by_teacher = [name for name in calls if name.endswith(" of the teacher")]
    assert len(by_teacher) == 4 * 4, "four microbatches of a step, four layers"
    assert sorted(sent) == [1] * (4 + 2 * 4) + [3] * 4, "gradients, evaluations, and forwards"
    without = evaluated(taught(folder, train={**own, "teacher": None}, optimizer=still))
    assert with_one == without


def test_only_the_same_teacher_goes_on(folder: Path, tmp_path: Path) -> None:
    expected = ran((1, 1), taught(folder, checkpoint={"every": 2}), tmp_path / "run")
    other = tmp_path / "gpt2"
    other.mkdir()
    weights = gpt2_folder(other, small_gpt())
    gpt2_folder(other, small_gpt(), {"transformer.ln_f.weight": weights["head.norm.weight"] + 1})
    step = str(tmp_path / "run" / "checkpoints" / "step-2")
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))

    resumed = ran((2, 1), taught(moved), tmp_path / "on", resume=step)

    assert resumed.losses == {step: expected.losses[step] for step in (3, 4)}
    with pytest.raises(DataError, match=r"^train\.teacher: its weights are not those by which "):
        ran((1, 1), taught(other), tmp_path / "other", resume=step)
    with pytest.raises(ConfigError, match=r"^train\.teacher .*: None, but checkpoint"):
        ran((1, 1), taught(folder, train={"teacher": None}), tmp_path / "none", resume=step)
    with pytest.raises(ConfigError, match=r"^train\.distillation_weight .*: 0\.5, but checkpoint"):
        ran((1, 1), taught(folder, train={"distillation_weight": 0.5}), tmp_path / "x", resume=step)


def with_and_without(config: Config) -> list[ProfiledModel]:
    """A small GPT as plans see it, with its teacher and alone."""
    model = with_teacher(tiny_gpt(config), config, reads_weights=False)
    both = model, replace(model, teacher=None)
    return [ProfiledModel(config, profile(one), {}, ADAMW, one) for one in both]


@pytest.mark.parametrize("layers", by_default([5], [1, 2, 5]))
@pytest.mark.parametrize("precision", by_default(["bf16"], ["fp32", "bf16"]))
def test_a_plan_counts_the_bytes_that_are_there(
    transformers: Any, tmp_path: Path, precision: str, layers: int
) -> None:
    """Also those of its embedding, which is its head as well: once in one stage, twice in two."""
    folder = other_llama(tmp_path / "llama", num_hidden_layers=layers, tie_word_embeddings=True)
    config = taught(folder, precision=precision, train={"steps": 1})
    taken = []
    for stages in (1, 2):
        planned = with_and_without(config)[0].stages(stages, 1)
        assert planned is not None
        split = {"layout": {"split": [len(one.numbers) for one in planned]}}
        run = taught(folder, precision=precision, train={"steps": 1}, **split)
        bare = with_and_without(run)[1].stages(stages, 1)
        assert bare is not None
        trained = train_in_process(stages, 1, tiny_gpt(run), run, token_data())
        taken.append(0)
        for (trainer, _), here, alone in zip(trained, planned, bare, strict=True):
            live = sum((layer.state.live_bytes() for layer in trainer.teacher), StateBytes())
            assert here.state.weight - alone.state.weight == live.total
            taken[-1] += live.total

    width = 4 if precision == "fp32" else 2
    assert taken[1] - taken[0] == width * VOCABULARY * SMALL_LLAMA["hf"]["hidden_size"]


def test_a_plan_counts_the_forward_of_the_teacher(folder: Path) -> None:
    """Of a teacher of the same sizes it takes as long as the model's, and a third of its step."""
    models = with_and_without(taught(folder))
    rates = replace(load_cluster("dgx-h100"), peak_fp32=1e12)
    for stages in (1, 3):
        taught_loads, loads = (model.stages(stages, 1) for model in models)
        assert taught_loads is not None and loads is not None
        for here, alone in zip(taught_loads, loads, strict=True):
            assert here.numbers == alone.numbers
            after, before = (
                stage_seconds(model, one, rates, 1)
                for model, one in zip(models, (here, alone), strict=True)
            )
            assert after.backward == before.backward
            assert after.forward == pytest.approx(2 * before.forward)
        assert taught_loads[0].outputs == 2 * loads[0].outputs
    assert models[0].sample_flops == pytest.approx(models[1].sample_flops * 4 / 3)
    profiled = models[0].profile
    works = [layer.work * 4 / 3 for layer in profiled.layers]
    assert profiled.shares_of_work == pytest.approx(works)
