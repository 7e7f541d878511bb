"""A cluster of round numbers, the study's GPTs, costs by hand, and a survey of four layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from published.gpt_formula import GptFormula
from support.cases import merged
from support.runs import tiny_config, tiny_gpt

from axsparse.config.load import load_config, made_in_python
from axsparse.config.model_config import GptConfig, of_family
from axsparse.models.layer_cost import Activations
from axsparse.models.survey import LayerInfo, ParameterInfo, Survey
from axsparse.models.survey import survey as surveyed_layers
from axsparse.pipeline.schedules import Schedule, ScheduleName
from axsparse.planner.cluster import Cluster, load_cluster
from axsparse.planner.cutting import Cutting
from axsparse.planner.layout import LayoutQuestion
from axsparse.planner.layout_search import Plan, plan
from axsparse.planner.step_cost import StageSeconds, StepCosts
from axsparse.planner.surveyed_model import SurveyedModel
from axsparse.samo.optim.adamw import ADAMW

SUMMIT = load_cluster("summit")


def cluster(**constants: Any) -> Cluster:
    """Summit but for some constants."""
    return replace(SUMMIT, **constants)


def formula(config: str, density: float = 1.0) -> GptFormula:
    """A bundled GPT as formulas."""
    model = of_family(load_config(config).config.model, GptConfig)
    return GptFormula(
        name=config,
        layers=model.num_layers,
        hidden=model.hidden_size,
        heads=model.num_heads,
        sequence=model.sequence_length,
        vocabulary=model.vocab_size,
        density=density,
    )


def uniform(
    g_inter: int,
    forward: float,
    backward: float,
    *,
    message: float = 0.0,
    all_reduce: float = 0.0,
    optimizer: float = 0.0,
    compress: float = 0.0,
) -> StepCosts:
    """Equal stages."""
    return StepCosts(
        stages=[StageSeconds(forward, backward, compress)] * g_inter,
        messages=[message] * (g_inter - 1),
        all_reduce=[all_reduce] * g_inter,
        optimizer=[optimizer] * g_inter,
    )


def schedule(name: ScheduleName = "message-driven", slack: int = 1) -> Schedule:
    return Schedule(name, slack, "alternate")


def planned(config: str, density: float = 1.0, machine: Cluster = SUMMIT, **question: Any) -> Plan:
    """The plan of a bundled GPT."""
    return plan(LayoutQuestion(workload=formula(config, density), cluster=machine, **question))


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


def of_three_axes(
    room: float, gpus: int = 8, members: Sequence[int] = (1, 2, 4, 8), **constants: Any
) -> Plan:
    """The plan of a GPT of four heads in so many bytes a device."""
    config = tiny_config(model={"num_heads": 4}, samo={"enabled": False})
    model = tiny_gpt(config)
    info = surveyed_layers(model)
    cutting = Cutting(made_in_python(config, "tiny"), model, info, ADAMW)
    subject = SurveyedModel(config, info, "tiny", {}, ADAMW, cutting=cutting)
    machine = cluster(**{"peak_fp32": 1e9, "overhead_bytes": 0.0, "gpus_per_node": 8} | constants)
    return plan(
        LayoutQuestion(
            workload=subject,
            cluster=machine,
            gpus=gpus,
            global_batch_size=8,
            members=members,
            schedules=[schedule(slack=0)],
            microbatch_sizes=[1],
            memory_bytes=room,
        )
    )
