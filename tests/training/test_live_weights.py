"""The weights of a training as plain torch has them, without files in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.images import assert_equal_tensors
from support.resuming import ran
from support.runs import (
    FEW_MICROBATCHES,
    around_step,
    default_dtype,
    summed_loss,
    tiny_config,
    vector_data,
)
from torch import Tensor, nn

import axsparse as ax
from axsparse.config.schema import Config
from axsparse.models.layer import Model

STEPS = 3


class Shifted(nn.Module):
    """Has a buffer that no state dict has, and one weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(24, 24)
        self.second = nn.Linear(24, 24)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.full((24,), 0.5), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        shift = self.shift
        assert isinstance(shift, Tensor)
        mixed: Tensor = self.second(torch.tanh(self.first(x)))
        return mixed + shift


class Classifier(nn.Sequential):
    """A class of the user's, with a method and an attribute."""

    classes = ("a", "b", "c", "d", "e")

    def named(self, inputs: Tensor) -> list[str]:
        return [self.classes[number] for number in self(inputs).argmax(dim=1)]


def modules() -> Classifier:
    torch.manual_seed(0)
    return Classifier(nn.Linear(16, 24), nn.BatchNorm1d(24), Shifted(), nn.Linear(24, 5))


def own_model(_: Config) -> Model:
    made = modules()
    made.classes = ("v", "w", "x", "y", "z")
    return ax.from_sequential(made, summed_loss)


def config_of(**sections: object) -> Config:
    train = {"steps": STEPS, "eval_steps": "all"}
    return tiny_config(train=train, batch=FEW_MICROBATCHES, **sections)


class Taken:
    """The weights that each rank's trainer gave after its last step."""

    def __init__(self) -> None:
        self.trainers: list[ax.Trainer] = []
        self.states: list[dict[str, Tensor] | None] = []
        self.models: list[nn.Module | None] = []

    def look(self, trainer: ax.Trainer) -> None:
        self.trainers.append(trainer)
        around_step(after=self.take)(trainer)

    def take(self, trainer: ax.Trainer, _: object) -> None:
        if trainer.steps_done == STEPS:
            with trainer._within("on_step"):
                self.states.append(trainer.state_dict())
                self.models.append(trainer.model())

    def on_first_rank(self) -> tuple[dict[str, Tensor], nn.Module]:
        [state] = [state for state in self.states if state is not None]
        [model] = [model for model in self.models if model is not None]
        return state, model


@pytest.mark.parametrize(
    ("layout", "shard", "precision"), [((1, 1), False, "fp32"), ((2, 2), True, "bf16")]
)
def test_a_trainer_has_what_its_checkpoint_has(
    layout: tuple[int, int], shard: bool, precision: str, tmp_path: Path
) -> None:
    config = config_of(precision=precision, samo={"zero_stage": int(shard)})
    taken = Taken()

    ran(layout, config, tmp_path / "run", look=taken.look)

    state, model = taken.on_first_rank()
    assert_equal_tensors(state, ax.load(tmp_path / "run"))
    head, embedding = model.get_parameter("head.weight"), model.get_parameter("embed.token.weight")
    assert head is embedding  # one weight with two uses stays one
    with torch.no_grad():
        hidden, weight = model(torch.zeros(2, 12, dtype=torch.int64))[:2]
    assert (hidden.shape, weight.shape) == ((2, 12, 32), (64, 32))


def test_gathered_masters_are_fp32_also_where_torchs_default_type_is_another(
    tmp_path: Path,
) -> None:
    taken, config = Taken(), config_of(precision="bf16", samo={"zero_stage": 1})
    data, run = vector_data(), tmp_path / "run"
    layers = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 5))
    model = ax.from_sequential(layers, summed_loss)
    with default_dtype(torch.float64):
        ran((1, 2), config, run, model=lambda _: model, data=data, look=taken.look)

    state, _ = taken.on_first_rank()
    assert {value.dtype for value in state.values()} == {torch.float32}


@pytest.mark.parametrize("layout", [(2, 2), (4, 1)])
def test_the_plain_module_has_the_loss_that_was_reported(
    layout: tuple[int, int], tmp_path: Path
) -> None:
    taken, validation = Taken(), vector_data(samples=30)

    ran(
        layout,
        config_of(),
        tmp_path / "run",
        model=own_model,
        data=vector_data(),
        validation=validation,
        look=taken.look,
    )

    state, model = taken.on_first_rank()
    names = modules().state_dict().keys()
    saved, file = ax.load(tmp_path / "run"), tmp_path / "weights.safetensors"
    ax.export(tmp_path / "run", "torch", file)
    opened = ax.open_weights(file)
    assert state.keys() == saved.keys() == opened.shapes.keys() == names
    assert state["2.second.weight"] is state["2.first.weight"]
    again = ax.start_from(ax.from_sequential(modules(), summed_loss), opened).start
    assert again is not None
    assert torch.equal(opened.read("2.second.weight"), state["2.first.weight"])
    assert_equal_tensors(saved, state)
    reported = taken.trainers[0].last_evaluation
    (inputs,), targets = validation.read(np.arange(30))
    with torch.no_grad():
        loss = float(summed_loss(model(inputs), targets)) / 30
    assert reported is not None
    assert loss == pytest.approx(reported.loss, rel=1e-5)
    assert isinstance(model, Classifier)
    assert set(model.named(inputs)) <= set("vwxyz")


class Scaled(nn.Module):
    """Has a list of layers, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(16, 24), Cooled(), nn.Linear(24, 24), Cooled()])
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.head(x)
        return made


class Cooled(nn.Module):
    temperature: Any = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.still = nn.Dropout(0.25), nn.Dropout(0.0).eval()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.drop(x) / self.temperature
        return made


def own_forward(_: Config) -> Model:
    return ax.from_module(Scaled(), summed_loss, example=lambda n: (torch.zeros(n, 16),))


def listed(_: Config) -> Model:
    given = Scaled()
    return ax.from_sequential([*given.layers, given.head], summed_loss)


@pytest.mark.parametrize(("made", "prefix"), [(own_forward, "layers."), (listed, "")])
@pytest.mark.parametrize("layout", [(1, 1), (2, 2)])
def test_numbers_that_a_program_sets_in_layers_are_those_of_the_plain_module(
    layout: tuple[int, int], made: Callable[[Config], Model], prefix: str, tmp_path: Path
) -> None:
    taken, data = Taken(), vector_data()

    def cool(trainer: ax.Trainer, result: object) -> None:
        for module in (m for layer in trainer.layers for m in layer.module.modules()):
            if isinstance(module, Cooled):
                module.temperature, module.drop.p = np.float32(2.5), 0.125
                module.still.train()
        taken.take(trainer, result)

    look = around_step(after=cool)
    ran(layout, config_of(), tmp_path / "run", model=made, data=data, look=look)

    _, model = taken.on_first_rank()
    for number in "13":
        cooled = model.get_submodule(prefix + number)
        assert isinstance(cooled, Cooled)
        assert (cooled.temperature, cooled.drop.p, cooled.calls) == (2.5, 0.125, 0)
        assert not (cooled.training or cooled.still.training)


def test_frozen_weights_come_back_as_they_were_given(tmp_path: Path) -> None:
    def frozen() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(16, 24).requires_grad_(False)

    def own(_: Config) -> Model:
        return ax.from_sequential([frozen(), nn.Linear(24, 24), nn.Linear(24, 5)], summed_loss)

    taken, config = Taken(), config_of(precision="bf16", checkpoint={"every": 2})
    for resume in (None, "auto"):
        ran(
            (2, 1),
            config if resume else config.with_values({"train.steps": 2}),
            tmp_path / "run",
            model=own,
            data=vector_data(),
            look=taken.look,
            resume=resume,
        )

    given = frozen().weight.detach()
    assert not torch.equal(given, given.bfloat16().float())
    state, model = taken.on_first_rank()
    saved = ax.load(tmp_path / "run")
    for weight in (state["0.weight"], model.get_parameter("0.weight"), saved["0.weight"]):
        assert torch.equal(weight, given)


def test_weights_that_a_program_lends_to_an_evaluation_leave_the_masters_as_they_are() -> None:
    def trained(lend: Callable[[Tensor], Tensor]) -> tuple[dict[str, Tensor] | None, list[float]]:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 24), nn.Linear(24, 5))
        data, losses = vector_data(), list[float]()
        model = ax.from_sequential(layers, summed_loss)
        trainer = ax.Trainer(model, (data, data), config_of(precision="bf16"), quiet=True)
        weights = [weight for layer in trainer.layers for weight in layer.module.parameters()]

        @torch.no_grad()
        def evaluate(*_: object) -> None:
            own = [weight.clone() for weight in weights]
            for weight in weights:
                weight.copy_(lend(weight))
            evaluation = trainer.evaluate()
            assert evaluation is not None
            losses.append(evaluation.loss)
            for weight, value in zip(weights, own, strict=True):
                weight.copy_(value)

        trainer.train(evaluate)
        return trainer.state_dict(), losses

    plain, _ = trained(lambda weight: weight)
    lent, losses = trained(lambda weight: weight + 0.1)
    _, masked = trained(lambda weight: (weight + 0.1) * (weight != 0))

    assert plain is not None and lent is not None
    assert all(torch.equal(lent[name], value) for name, value in plain.items())
    assert losses == masked
