"""A cluster of round numbers, bundled GPTs, costs by hand, and a profile of four layers."""

from __future__ import annotations

from dataclasses import MISSING, fields, replace
from functools import cache
from typing import Any

from support.cases import merged
from support.runs import tiny_config, tiny_gpt

from axsparse.config.load import configure
from axsparse.config.schema import Config, num_microbatches
from axsparse.models.layer import Model
from axsparse.models.layer_cost import Activations
from axsparse.models.model_profile import LayerInfo, ModelProfile, ParameterInfo, profile
from axsparse.pipeline.policy import Schedule
from axsparse.planner.auto_layout import configured_schedule
from axsparse.planner.cluster import Cluster, load_cluster
from axsparse.planner.layout_search import Layout, Plan, SearchRequest, plan
from axsparse.planner.plan_model import planned_model
from axsparse.planner.profiled_model import ProfiledModel, state_format
from axsparse.planner.stage_memory import StageLoad
from axsparse.planner.step_cost import StageSeconds, StepCosts
from axsparse.runtime.grid import Grid
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.precision import DTYPES
from axsparse.samo.state_bytes import StateBytes, stage_bytes
from axsparse.tensor_parallel.dry_run import profile_of_tp_shard
from axsparse.training.trainer import Trainer

SUMMIT = load_cluster("summit")


def cluster(**constants: Any) -> Cluster:
    """Summit but for some constants."""
    return replace(SUMMIT, **constants)


def load_of(**sizes: Any) -> StageLoad:
    """A load of these sizes, and of 0 for all others."""
    zero = {each.name: 0 for each in fields(StageLoad) if each.default is MISSING}
    return StageLoad(**{**zero, "layers": "", "state": StateBytes(), **sizes})


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
    return StepCosts(
        stages=[StageSeconds(forward, backward, compress)] * g_inter,
        messages=[message] * (g_inter - 1),
        all_reduce=[all_reduce] * g_inter,
        optimizer=[optimizer] * g_inter,
    )


SCHEDULE = Schedule("message-driven", 1)


@cache
def bundled(config: str, density: float = 1.0) -> ProfiledModel:
    """A bundled GPT in fp16, dense or with this part of its blocks' matrices kept."""
    settings = ["precision=fp16", "pipeline.split_backward=false"]
    asked = configure(config, [*settings, f"pruning.sparsity={1 - density:g}"])
    return planned_model(asked, SUMMIT).profiled("samo" if density < 1 else "dense")


def planned(config: str, density: float = 1.0, machine: Cluster = SUMMIT, **request: Any) -> Plan:
    """The plan of a bundled GPT, with full backwards and all memory of a device by default."""
    request = {"rank_budget": machine.memory_bytes, **request}
    return plan(SearchRequest(model=bundled(config, density), cluster=machine, **request))


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


FOUR_LAYERS = ModelProfile(
    [layer("a", 10, 1e3), layer("b", 40, 4e3, 700), layer("c", 20, 2e3), layer("d", 10, 3e3)],
    ties={},
)
KEPT = {"b.weight": 40, "c.weight": 20}
SETTINGS = {
    "precision": "bf16",
    "samo": {"gradient": "fp32", "index": "int32"},
    "pipeline": {"checkpoint_activations": 1},
}


def profiled(
    profile: ModelProfile = FOUR_LAYERS, kept: dict[str, int] | None = None, **sections: Any
) -> ProfiledModel:
    """The model of a profile, with some settings."""
    config = tiny_config(**merged(SETTINGS, sections))
    return ProfiledModel(config, profile, KEPT if kept is None else kept, ADAMW)


def unpruned(config: Config, **facts: Any) -> ProfiledModel:
    """The dense GPT of a configuration."""
    model = tiny_gpt(config)
    info = profile(model, DTYPES[config.precision])
    return ProfiledModel(config.named("tiny"), info, {}, ADAMW, model, **facts)


def of_three_axes(g_tensor: int) -> Plan:
    """The plan of a GPT of four heads on eight devices, of so many tensor-parallel ranks."""
    whole = {"samo": {"enabled": False}, "pipeline": {"split_backward": False}}
    return plan(
        SearchRequest(
            model=unpruned(tiny_config(model={"num_heads": 4}, **whole)),
            cluster=cluster(peak_fp32=1e9, overhead_bytes=0.0, gpus_per_node=8),
            gpus=8,
            global_batch_size=8,
            g_tensor=g_tensor,
            microbatch_sizes=[1],
            rank_budget=1e9,
        )
    )


def planned_bytes(trainer: Trainer, model: Model) -> tuple[int, int]:
    """By formula: the state of a rank, given how many entries its masks keep of each tensor, and
    the bytes that it sends to the other tensor-parallel ranks of its stage in a step."""
    run, coords = trainer.plan, trainer.coords
    grid, config = coords.grid, run.config
    tp_rank = Grid(1, 1, grid.g_tensor).coords(coords.tp_rank)
    here = profile_of_tp_shard(model, profile(model, run.dtype), tp_rank, run.dtype)
    tensors = [tensor for layer in trainer.layers for tensor in layer.state.tensors]
    kept = {here.ties.get(tensor.name, tensor.name): tensor.kept for tensor in tensors}
    microbatches = num_microbatches(config.batch, grid.g_data)
    loads = ProfiledModel(config, here, kept, run.optimizer).stages(
        grid.g_inter, grid.g_data, microbatches=microbatches
    )
    assert loads is not None
    load = loads[coords.stage]
    assert load.numbers == run.stages[coords.stage]
    stored = state_format(config, run.optimizer, grid.g_data)
    layers = [here.layers[number] for number in load.numbers]
    state = stage_bytes(layers, here.ties, kept, stored, coords.replica)
    schedule = configured_schedule(config.pipeline)
    layout = Layout(grid, schedule, config.batch.microbatch_size, microbatches)
    return state.total, layout.sum_bytes(load)
