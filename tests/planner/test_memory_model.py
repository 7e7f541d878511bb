"""Bytes of a stage's activations."""

from __future__ import annotations

import pytest

from axsparse.models.cost import Activations
from axsparse.models.survey import LayerInfo
from axsparse.planner.memory import activation_bytes

LAYERS = [
    LayerInfo("a", "block", (), 1.0, activations=Activations(10, 100, 20)),
    LayerInfo("b", "block", (), 1.0, activations=Activations(20, 300, 30)),
    LayerInfo("c", "block", (), 1.0, activations=Activations(30, 200, 40)),
]


@pytest.mark.parametrize(
    ("every", "kept", "working"),
    [
        (0, 10 + 100 + 20 + 300 + 30 + 200 + 40, 0),
        (1, 10 + 20 + 30 + 40, 300),
        (2, 10 + 20 + 300 + 30 + 40, 200),
    ],
)
def test_recomputed_layers_keep_inputs_and_need_one_layers_room(
    every: int, kept: int, working: int
) -> None:
    found = activation_bytes(LAYERS, microbatch_size=2, in_flight=3, checkpoint_activations=every)

    assert found == 2 * (3 * kept + working)


def test_layers_without_an_example_count_nothing() -> None:
    layers = [LayerInfo("a", "block", (), 1.0)]

    assert not activation_bytes(layers, microbatch_size=2, in_flight=3, checkpoint_activations=1)
