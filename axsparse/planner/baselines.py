"""The memory of dense training by DDP, ZeRO and pipelines, by published formulas.

A device holds 2 + 2 + K bytes a parameter in half precision (4 + 4 + K in fp32): weight, gradient,
and master and moments, K = 12 for Adam. Of N devices, ZeRO-1 shares K out, and ZeRO-3, which is
FSDP's full sharding, all of them (Rajbhandari et al. 2020, arXiv 1910.02054, figure 1). A stage of
a pipeline holds its parameters. The bytes of each kind come from `samo/state_bytes.py`. Activations
and overhead are the plan's; buffers and gathered layers come on top of the formulas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from axsparse.planner.layout_search import Layout, SearchRequest
from axsparse.planner.profiled_model import ProfiledModel, state_format
from axsparse.planner.stage_memory import StageLoad, StageMemory, stage_memory, value_bytes
from axsparse.samo.state_bytes import MOMENT_BYTES

PAPER = "arXiv 1910.02054"
PLAIN = {"samo.gradient": "half", "samo.zero_stage": 0, "samo.offload": False}


@dataclass(frozen=True)
class Baseline:
    """One way of dense training, and the memory that it needs."""

    name: str
    formula: str
    """Bytes of state for each parameter, on a device."""
    nbytes: float
    """Bytes of a device, overhead included."""


def baselines(
    dense: ProfiledModel, layout: Layout, loads: Sequence[StageLoad], request: SearchRequest
) -> list[Baseline]:
    """The dense memory of a device, for comparison with a plan of this layout and these stages."""
    gpus, overhead = request.gpus, request.cluster.overhead_bytes
    dense = dense.with_values({**PLAIN, "layout.split": "auto"})
    [whole] = dense.stages(1, 1) or []
    size = layout.microbatch_size
    memory = stage_memory(whole, microbatch_size=size, in_flight=1, overhead=overhead)
    weight, others, rest = memory.weight, memory.master + memory.optimizer, _other_bytes(memory)
    stored = state_format(dense.config, dense.optimizer, 1)
    width = value_bytes(dense.precision)
    # Of a tied weight there is one gradient, where we have one for each use.
    gradient = width * _trained(dense)
    k = stored.master_bytes + MOMENT_BYTES * len(stored.moments)
    own = f"{width} + {width} + {k}"
    found = [Baseline("dense, DDP", own, weight + gradient + others + rest)]
    if gpus > 1:
        found += [
            Baseline("dense, ZeRO-1", f"{own}/{gpus}", weight + gradient + others / gpus + rest),
            Baseline(
                "dense, ZeRO-3 or FSDP",
                f"({own})/{gpus}",
                (weight + gradient + others) / gpus + rest,
            ),
        ]
    if layout.grid.g_inter > 1:
        split = tuple(len(load.numbers) for load in loads)
        same = dense.with_values({"layout.split": split}).tp_shard(layout.grid.g_tensor)
        stages = layout.memory(same.stages(len(split), 1) or [], overhead)
        most = max(
            each.weight + each.gradient + each.master + each.optimizer + _other_bytes(each)
            for each in stages
        )
        name = f"dense, pipeline of {layout.grid.g_inter}"
        found.append(Baseline(name, f"{own} of a stage", most))
    return found


def _trained(model: ProfiledModel) -> int:
    parameters = (each for layer in model.profile.layers for each in layer.parameters)
    return sum(p.numel for p in parameters if p.trained and p.name not in model.profile.ties)


def _other_bytes(memory: StageMemory) -> float:
    return memory.activations + memory.working + memory.logits + memory.overhead
