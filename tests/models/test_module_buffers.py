"""The modes of modules whose own `train` changes more, and buffers in two places."""

from __future__ import annotations

import pytest
import torch
from support.runs import summed_loss, tiny_config, vector_data
from torch import Tensor, nn

import axsparse as ax
from axsparse.models.module_buffers import (
    has_own_train,
    set_mode,
    start_training,
    switch_mode,
)
from axsparse.runtime.errors import ConfigError


class Changing(nn.Module):
    """Its `train` counts up one of its tensors, or replaces it."""

    def __init__(self, changed: str, *, replaces: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("saved", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.changed, self.replaces = changed, replaces

    def train(self, mode: bool = True) -> Changing:
        tensor: Tensor = getattr(self, self.changed)
        if self.replaces:
            setattr(self, self.changed, type(tensor)(tensor.detach().clone()))
        else:
            tensor.data += 1
        return super().train(mode)


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("changed", ["weight", "saved", "cache"])
def test_a_train_of_a_modules_own_may_change_its_caches_alone(changed: str, replaces: bool) -> None:
    module = nn.Sequential(Changing(changed, replaces=replaces))
    if changed == "cache":
        switch_mode("a", module, training=False)
        assert not module.training
        return

    with pytest.raises(ConfigError, match=rf"^layer a: its eval\(\) writes to '0.{changed}'"):
        switch_mode("a", module, training=False)


class Freezing(nn.Linear):
    """Stays in evaluation."""

    def train(self, mode: bool = True) -> Freezing:
        super().train(mode)
        self.training = False
        return self


class Fitted(nn.Sequential):
    """Its `train` is a loop over data, as scikit-learn's fit."""

    def train(self, loader: object, epochs: int = 1) -> None:  # type: ignore[override]
        raise AssertionError("trains")


class Row(nn.Module):
    """Runs its members in their order."""

    def __init__(self, members: nn.ModuleList) -> None:
        super().__init__()
        self.members = members

    def forward(self, x: Tensor) -> Tensor:
        for member in self.members:
            x = member(x)
        return x


def test_a_train_that_is_a_loop_over_data_is_not_called() -> None:
    inner = Fitted(nn.Dropout(), Freezing(1, 1))
    module = Fitted(inner, nn.Dropout())
    start_training(module)
    assert [child.training for child in (module, inner, inner[0], inner[1])] == [True] * 3 + [False]

    set_mode(module, training=False)
    assert not any(child.training for child in module.modules())


@pytest.mark.parametrize("kind", ["list", "Sequential", "own forward"])
def test_a_model_of_such_modules_trains_and_comes_back(kind: str) -> None:
    blocks = [nn.Sequential(nn.Linear(16, 16), Fitted(nn.Dropout())), nn.Linear(16, 5)]
    given = blocks if kind == "list" else nn.Sequential(*blocks)
    is_own = kind == "own forward"
    trainer = ax.Trainer(
        Row(nn.ModuleList(blocks)) if is_own else ax.from_sequential(given, summed_loss),
        vector_data(),
        tiny_config(train={"steps": 1}),
        loss=summed_loss if is_own else None,
        quiet=True,
    )
    trainer.train()

    back = trainer.model()

    assert back is not None and not any(child.training for child in back.modules())


@pytest.mark.parametrize(
    ("train", "is_mode"),
    [
        (lambda self, mode=True: None, True),
        (lambda self, on=True: None, True),
        (lambda self, *modes: None, True),
        (lambda self, verbose=False: None, False),
        (lambda self, *, mode=True: None, False),
        (lambda self: None, False),
    ],
)
def test_a_train_of_a_modules_own_is_a_mode_by_its_parameter(train: object, is_mode: bool) -> None:
    module = type("Own", (nn.Module,), {"train": train})()

    assert has_own_train(module) is is_mode


class Annealed(nn.Module):
    """Counts its calls in a buffer that its child has as well."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(()))
        self.child = nn.Linear(16, 16)
        self.child.register_buffer("step", self.get_buffer("step"))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.get_buffer("step").add_(1.0)
        mixed: Tensor = self.child(x)
        return x + mixed / self.child.get_buffer("step")


@pytest.mark.parametrize("recomputed", [0, 1])
def test_a_buffer_that_two_modules_share_stays_one(recomputed: int) -> None:
    torch.manual_seed(0)
    model = ax.from_sequential(nn.Sequential(Annealed(), nn.Linear(16, 5)), summed_loss)
    config = tiny_config(train={"steps": 2}, pipeline={"checkpoint_activations": recomputed})
    trainer = ax.Trainer(model, vector_data(), config, quiet=True)
    trainer.train()

    saved, back = trainer.state_dict(), trainer.model()

    assert saved is not None and back is not None
    assert saved["0.child.step"] == saved["0.step"] > 2
    assert back.get_buffer("0.child.step") is back.get_buffer("0.step")
