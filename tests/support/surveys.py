"""A survey by hand: four layers of one matrix and one frozen vector; and its model."""

from __future__ import annotations

from typing import Any

from support.cases import merged
from support.runs import tiny_config

from axsparse.models.layer_cost import Activations
from axsparse.models.survey import LayerInfo, ParameterInfo, Survey
from axsparse.planner.surveyed_model import SurveyedModel
from axsparse.samo.optim.adamw import ADAMW


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
SETTINGS = {
    "precision": "bf16",
    "samo": {"gradient": "fp32", "index": "int32"},
    "pipeline": {"checkpoint_activations": 1},
}


def surveyed(
    survey: Survey = SURVEY, kept: dict[str, int] | None = None, **sections: Any
) -> SurveyedModel:
    """The model of a survey, with some settings."""
    config = tiny_config(**merged(SETTINGS, sections))
    return SurveyedModel(config, survey, "four layers", KEPT if kept is None else kept, ADAMW)
