"""The memory of dense training by DDP, ZeRO and pipelines, by published formulas.

A device holds 2 + 2 + K bytes a parameter in half precision (4 + 4 + K in fp32): weight, gradient,
and master and moments, K = 12 for Adam. Of N devices, ZeRO-1 shares K out, and ZeRO-3, which is
FSDP's full sharding, all of them (Rajbhandari et al. 2020, arXiv 1910.02054, figure 1). A stage of
a pipeline holds its parameters. The bytes of each kind come from `samo/state_bytes.py`. Activations
and overhead are the plan's; buffers and gathered layers come on top of the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from axsparse.config.schema import Config
from axsparse.planner.layout_search import Layout
from axsparse.planner.profiled_model import ProfiledModel, state_format
from axsparse.planner.stage_memory import StageMemory, stage_memory
from axsparse.planner.workload import StageLoad, value_bytes
from axsparse.samo.state_bytes import MOMENT_BYTES

PAPER = "arXiv 1910.02054"


@dataclass(frozen=True)
class Baseline:
    """One way of dense training, and the memory that it needs."""

    name: str
    formula: str
    """Bytes of state for each parameter, on a device."""
    nbytes: float
    """Bytes of a device, overhead included."""


def baselines(
    model: ProfiledModel,
    layout: Layout,
    loads: Sequence[StageLoad],
    gpus: int,
    overhead: float,
) -> list[Baseline]:
    """The dense memory of a device, for comparison with a plan of this layout and these stages."""
    dense = replace(model, kept={}, config=_dense(model.config, "auto"))
    [whole] = dense.stages(1, 1) or []
    size = layout.microbatch_size
    memory = stage_memory(whole, microbatch_size=size, in_flight=1, overhead=overhead)
    weight, others, beside = memory.weight, memory.master + memory.optimizer, _other_bytes(memory)
    stored = state_format(dense.config, dense.optimizer, 1)
    width = value_bytes(dense.precision)
    # Of a tied weight there is one gradient, where we have one for each use.
    gradient = width * _trained(dense)
    k = stored.master_bytes + MOMENT_BYTES * stored.moments
    own = f"{width} + {width} + {k}"
    found = [Baseline("dense, DDP", own, weight + gradient + others + beside)]
    if gpus > 1:
        found += [
            Baseline("dense, ZeRO-1", f"{own}/{gpus}", weight + gradient + others / gpus + beside),
            Baseline(
                "dense, ZeRO-3 or FSDP",
                f"({own})/{gpus}",
                (weight + gradient + others) / gpus + beside,
            ),
        ]
    if layout.grid.g_inter > 1:
        split = tuple(len(load.numbers) for load in loads)
        same = replace(dense, config=_dense(model.config, split)).tp_shard(layout.grid.g_tensor)
        stages = layout.memory(same.stages(len(split), 1) or [], overhead)
        most = max(
            each.weight + each.gradient + each.master + each.optimizer + _other_bytes(each)
            for each in stages
        )
        name = f"dense, pipeline of {layout.grid.g_inter}"
        found.append(Baseline(name, f"{own} of a stage", most))
    return found


def _trained(model: ProfiledModel) -> int:
    """The trained parameters of a model, a tied one once."""
    parameters = (each for layer in model.profile.layers for each in layer.parameters)
    return sum(p.numel for p in parameters if p.trained and p.name not in model.profile.ties)


def _other_bytes(memory: StageMemory) -> float:
    return memory.activations + memory.working + memory.logits + memory.overhead


def _dense(config: Config, split: object) -> Config:
    """The configuration with state as frameworks store it, in stages of so many layers each."""
    plain = {"gradient": "half", "zero_stage": 0, "offload": False}
    return config.model_copy(
        update={
            "samo": config.samo.model_copy(update=plain),
            "layout": config.layout.model_copy(update={"split": split}),
        }
    )
