"""Parameters with separate settings; every optimizer by itself is in the table."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.exhaustive import by_default
from support.oracle import Oracle, adamw, sgd
from support.resuming import ran
from support.runs import assert_bitwise, tiny_config, tiny_gpt, token_data, train_in_process
from torch import Tensor

import axsparse as ax
from axsparse.config.schema import Config
from axsparse.models.model_profile import profile
from axsparse.runtime.errors import DataError

STEPS = 6


def config_of(optimizer: dict[str, Any], **sections: Any) -> Config:
    return tiny_config(
        optimizer=optimizer,
        schedule={"decay": "step", "step_every": 3, "step_factor": 0.5},
        train={"steps": STEPS},
        **sections,
    )


GROUPS: dict[str, Any] = {
    "learning_rates": ["block0.*=0.02", "*.fc2.weight=0.003", "head.weight=0"],
    "weight_decays": ["block1.fc1.bias=0.5", "embed.*=0.3", "block0.fc1.weight=0"],
}


def groups_of_oracle(config: Config) -> dict[str, tuple[float, float]]:
    """The same settings in words that need no pattern."""
    rate, decay = config.optimizer.learning_rate, config.optimizer.weight_decay
    own = {}
    for name, shape in profile(tiny_gpt(config)).shapes.items():
        decays = decay if len(shape) >= 2 else 0.0
        if name.endswith(".fc2.weight"):
            own[name] = (0.003, decays)
        elif name == "block0.fc1.weight":
            own[name] = (0.02, 0.0)
        elif name.startswith("block0."):
            own[name] = (0.02, decays)
        elif name == "block1.fc1.bias":
            own[name] = (rate, 0.5)
        elif name == "embed.token.weight":
            own[name] = (0.0, 0.3)
        elif name.startswith("embed."):
            own[name] = (rate, 0.3)
    return own


@pytest.mark.parametrize(
    ("layout", "shard", "rule"), [((2, 1), False, "sgd"), ((2, 2), True, "adamw")], ids=str
)
def test_parameters_with_settings_of_their_own_are_bitwise_torchs_in_every_layout(
    layout: tuple[int, int], shard: bool, rule: str
) -> None:
    g_inter, g_data = layout
    settings = {"name": rule, "learning_rate": 0.01, "weight_decay": 0.1, **GROUPS}
    config = config_of(settings, samo={"zero_stage": int(shard)})
    own = groups_of_oracle(config)
    dense = Oracle(
        tiny_gpt(config), config, token_data(), g_data, {"adamw": adamw, "sgd": sgd}[rule], own
    )
    start = {name: value.detach().clone() for name, value in dense.parameters.items()}
    oracle = dense.run(STEPS)
    assert torch.equal(oracle.weights["embed.token.weight"], start["embed.token.weight"])
    assert not torch.equal(oracle.weights["embed.position.weight"], start["embed.position.weight"])

    for _, trace in train_in_process(g_inter, g_data, tiny_gpt(config), config, token_data()):
        assert_bitwise(trace, oracle)


# -- of a user's own ------------------------------------------------------------------------------


def update_velocity(block: ax.Block, hyper: ax.Hyper) -> None:
    block.moments["velocity"].mul_(0.5).add_(block.grad)


def move_by_sign(block: ax.Block, statistics: Tensor | None, hyper: ax.Hyper) -> None:
    block.master.add_(block.moments["velocity"].sign(), alpha=-hyper.learning_rate)


SIGNS = ax.Optimizer(("velocity",), update_velocity, None, move_by_sign)


class DenseSigns(torch.optim.Optimizer):
    """The same rule over dense tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                velocity = state.setdefault("velocity", torch.zeros_like(weight))
                velocity.mul_(0.5).add_(weight.grad)
                weight.add_(velocity.sign(), alpha=-group["lr"])


def falling(step: int) -> float:
    return 0.02 / (step + 1)


@pytest.mark.parametrize(
    ("g_inter", "g_data", "shard"), by_default([(2, 2, True)], [(1, 1, False), (2, 2, True)])
)
def test_an_optimizer_of_ones_own_is_bitwise_the_dense_one(
    g_inter: int, g_data: int, shard: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a custom learning rate, of which a group has its part."""
    settings = {"learning_rate": 0.02, "learning_rates": ["block0.*=0.01"]}
    config = config_of(settings, samo={"zero_stage": int(shard)})
    groups = {
        name: (0.01, 0.0) for name in profile(tiny_gpt(config)).shapes if name.startswith("block0.")
    }
    monkeypatch.setattr(
        "support.oracle.learning_rate",
        lambda step, schedule, peak, decay_steps: falling(step) * (peak / 0.02),
    )
    dense = Oracle(
        tiny_gpt(config),
        config,
        token_data(),
        g_data,
        lambda groups, settings: DenseSigns(groups, {"lr": 0.02}),
        groups,
    )
    expected = dense.run(STEPS)

    own: dict[str, Any] = {"optimizer": SIGNS, "learning_rate": falling}
    ranks = train_in_process(g_inter, g_data, tiny_gpt(config), config, token_data(), **own)

    for _, trace in ranks:
        assert_bitwise(trace, expected)


def test_a_run_goes_on_with_its_own_optimizer_and_with_no_other(tmp_path: Path) -> None:
    own: dict[str, Any] = {"optimizer": SIGNS, "learning_rate": falling}
    config = config_of({})
    expected = ran((1, 1), config, tmp_path / "whole", **own)
    first = ran((2, 1), config, tmp_path / "run", stop_after=3, **own)
    assert first.stopped is not None
    other = shutil.copytree(tmp_path / "run", tmp_path / "other")

    with pytest.raises(DataError, match=r"lacks 'exp_avg/.*; go on with the optimizer that it has"):
        ran((1, 1), config, other, resume="auto")
    second = ran((1, 1), config, tmp_path / "run", resume="auto", **own)

    assert {**first.losses, **second.losses} == expected.losses
