"""Parameters with settings of their own; every optimizer by itself is in the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.oracle import Oracle, Trace, adamw, sgd
from support.runs import assert_bitwise, tiny_config, tiny_gpt, token_data, train_in_process

from axsparse.config.schema import Config
from axsparse.models.survey import survey
from axsparse.runtime.errors import ConfigError

STEPS = 6
LAMB: dict[str, Any] = {"name": "lamb", "eps": 1e-6}


def config_of(optimizer: dict[str, Any], **sections: Any) -> Config:
    return tiny_config(
        optimizer=optimizer,
        schedule={"decay": "step", "step_every": 3, "step_factor": 0.5},
        train={"steps": STEPS},
        **sections,
    )


def run(g_inter: int, g_data: int, config: Config) -> list[Trace]:
    ranks = train_in_process(g_inter, g_data, tiny_gpt(config), config, token_data())
    return [trace for _, trace in ranks]


GROUPS: dict[str, Any] = {
    "learning_rates": ["block0.*=0.02", "*.fc2.weight=0.003", "embed.token.weight=0"],
    "weight_decays": ["block1.fc1.bias=0.5", "embed.*=0.3", "block0.fc1.weight=0"],
}


def groups_of_oracle(config: Config) -> dict[str, tuple[float, float]]:
    """The same settings in words that need no pattern."""
    rate, decay = config.optimizer.learning_rate, config.optimizer.weight_decay
    own = {}
    for name, shape in survey(tiny_gpt(config)).shapes.items():
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
    ("layout", "shard", "rule"),
    [((1, 1), False, "adamw"), ((2, 1), False, "sgd"), ((2, 2), True, "adamw")],
    ids=str,
)
def test_parameters_with_settings_of_their_own_are_bitwise_torchs_in_every_layout(
    layout: tuple[int, int], shard: bool, rule: str
) -> None:
    g_inter, g_data = layout
    settings = {"name": rule, "learning_rate": 0.01, "weight_decay": 0.1, **GROUPS}
    config = config_of(settings, samo={"shard_optimizer": shard})
    own = groups_of_oracle(config)
    dense = Oracle(
        tiny_gpt(config), config, token_data(), g_data, {"adamw": adamw, "sgd": sgd}[rule], own
    )
    start = {name: value.detach().clone() for name, value in dense.parameters.items()}
    oracle = dense.run(STEPS)
    assert torch.equal(oracle.weights["embed.token.weight"], start["embed.token.weight"])
    assert not torch.equal(oracle.weights["embed.position.weight"], start["embed.position.weight"])

    for trace in run(g_inter, g_data, config):
        assert_bitwise(trace, oracle)


def test_lamb_on_two_stages_with_groups_is_bitwise_one_stage() -> None:
    config = config_of({**LAMB, **GROUPS})
    [one] = run(1, 1, config)

    for trace in run(2, 1, config):
        assert_bitwise(trace, one)


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("learning_rates", "head", r"optimizer.learning_rates: 'head' is not pattern=value"),
        ("weight_decays", "embed.*=-1", r"'embed.\*=-1' is not pattern=value with a value of at"),
        ("learning_rates", "*=nan", r"'\*=nan' is not pattern=value"),
        ("weight_decays", "tail.*=0", r"'tail.\*' matches no trained parameter; nearest: "),
    ],
)
def test_settings_of_no_parameter_are_refused(key: str, entry: str, message: str) -> None:
    config = config_of({key: [entry]})

    with pytest.raises(ConfigError, match=message):
        run(1, 1, config)
