"""Plans of a thousand equal layers: each is profiled and loaded once, whatever the cuts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.exhaustive import by_default
from support.runs import random_init, summed_loss, tiny_config
from torch import Tensor, nn

from axsparse.models.layer import Layer, Model
from axsparse.models.model_profile import profile
from axsparse.planner.profiled_model import ProfiledModel
from axsparse.planner.stage_memory import StageLoad
from axsparse.samo.optim.adamw import ADAMW

LAYERS = 1000
BUILT: list[int] = []


def linear(width: int, outputs: int) -> nn.Module:
    BUILT.append(width)
    return nn.Linear(width, outputs)


def deep_model(layers: int = LAYERS) -> Model:
    """Equal layers between two others."""
    widths = [(8, 16), *[(16, 16)] * (layers - 2), (16, 3)]
    made = [
        Layer(f"l{number}", partial(linear, *width), init=random_init)
        for number, width in enumerate(widths)
    ]
    return Model(made, summed_loss, example=lambda samples: (torch.zeros(samples, 8),))


def test_equal_layers_are_built_and_run_once() -> None:
    BUILT.clear()

    found = profile(deep_model())

    assert len(BUILT) == 3
    assert [layer.parameters[0].name for layer in found.layers[:3]] == [
        *("l0.weight", "l1.weight", "l2.weight")
    ]
    one_by_one = [Layer(f"l{n}", lambda: nn.Linear(16, 16)) for n in range(3)]
    alike = [Layer(f"l{n}", partial(nn.Linear, 16, 16)) for n in range(3)]

    def example(samples: int) -> tuple[Tensor, ...]:
        return (torch.zeros(samples, 16),)

    first, second = (
        profile(Model(layers, summed_loss, example=example)) for layers in (one_by_one, alike)
    )
    assert first == second


@pytest.mark.parametrize("stages", by_default([16], [2, 16, 250]))
def test_few_loads_are_made_and_they_are_those_of_the_stages(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory for a little more than an equal share, and less of it on the first stage."""
    model = ProfiledModel(tiny_config(), profile(deep_model()), {}, ADAMW)
    limit = [1.3 * LAYERS / stages] * stages
    limit[0] = 0.9 * LAYERS / stages
    made, new_load = list[range](), ProfiledModel._new_load

    def counted(self: ProfiledModel, numbers: range, g_data: int, half: bool) -> StageLoad:
        made.append(numbers)
        return new_load(self, numbers, g_data, half)

    monkeypatch.setattr(ProfiledModel, "_new_load", counted)

    def fits_budget(stage: int, load: StageLoad) -> bool:
        return load.trained <= 272 * limit[stage]

    loads = model.stages(stages, 1, fits_budget)

    assert loads is not None
    assert len(made) < 300, "not one for each pair of first and last layer"
    for load in loads:
        numbers = load.numbers
        fresh = new_load(model, numbers, 1, False)
        names = [f"l{numbers[0]}", f"l{numbers[-1]}"]
        assert load.layers == "–".join(dict.fromkeys(names))
        assert (load.state, load.held, load.flops, load.loss_bytes(1)) == (
            *(fresh.state, fresh.held, fresh.flops, fresh.loss_bytes(1)),
        )
