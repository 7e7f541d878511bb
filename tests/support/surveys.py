"""A survey by hand: four layers of one matrix and one frozen vector."""

from __future__ import annotations

from axsparse.models.layer_cost import Activations
from axsparse.models.survey import LayerInfo, ParameterInfo, Survey


def layer(name: str, rows: int, flops: float, saved: int = 100) -> LayerInfo:
    return LayerInfo(
        name,
        "block",
        (
            ParameterInfo(f"{name}.weight", (rows, 10), trained=True),
            ParameterInfo(f"{name}.frozen", (7,), trained=False),
        ),
        flops,
        activations=Activations(inputs=20, saved=saved, outputs=30, widest=50),
    )


SURVEY = Survey(
    [layer("a", 10, 1e3), layer("b", 40, 4e3, 700), layer("c", 20, 2e3), layer("d", 10, 3e3)],
    ties={},
)
KEPT = {"b.weight": 40, "c.weight": 20}
