"""The trainings of `gpu_train.py`, and their plans: no GPU is asked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from axsparse.config.load import configure
from axsparse.planner.auto_layout import predict
from axsparse.planner.cluster import load_cluster
from axsparse.planner.plan_model import Method, planned_model
from axsparse.planner.stage_memory import StageMemory, stage_memory
from axsparse.pruning.mask_file import write_masks
from axsparse.runtime.errors import ConfigError
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.samo.state_bytes import StateBytes

CLUSTER = "h200-node"
"""The cluster whose memory overhead the plan takes, and whose speeds it predicts seconds from."""
MICROBATCHES = 4
SIZES = (8, 4, 2, 1)
"""Of microbatches, to try."""
TILE, TILE_KEPT = 327_680, 32_768
"""A tenth exactly, and a divisor of GPT-3's matrices."""
COMMON = (
    "layout.g_inter=1",
    "pipeline.extra_in_flight=0",
    "train.eval_steps=0",
    "train.log_every=1",
    "checkpoint.every=0",
    "watchdog.timeout=0",
)


@dataclass(frozen=True)
class Training:
    """The request to a worker."""

    config: str
    overrides: tuple[str, ...]
    steps: int

    def with_(self, *more: str, steps: int | None = None) -> Training:
        return Training(self.config, (*self.overrides, *more), steps or self.steps)

    @property
    def microbatches(self) -> int:
        """Of a step."""
        batch = configure(self.config, self.all()).batch
        return batch.global_batch_size // batch.microbatch_size

    def all(self, *more: str) -> list[str]:
        return [*COMMON, *self.overrides, *more, f"train.steps={self.steps}"]


@dataclass(frozen=True)
class Planned:
    memory: StageMemory
    state: StateBytes
    model_flops: float
    """Of a step, without what is computed again."""
    all_flops: float
    tokens: int
    """Of a step."""
    parameters: int
    seconds: float
    """Of a step, by the constants of the cluster's page, which nobody has measured."""


def planned(training: Training, method: Method) -> Planned:
    loaded = configure(training.config, training.all())
    cluster = load_cluster(CLUSTER)
    asked = planned_model(loaded, cluster)
    config, model = loaded, asked.profiled(method)
    batch = config.batch
    loads = model.stages(1, 1, microbatches=batch.global_batch_size // batch.microbatch_size)
    assert loads is not None, "there is no limit"
    memory = stage_memory(
        loads[0],
        microbatch_size=batch.microbatch_size,
        in_flight=1,
        overhead=cluster.overhead_bytes,
    )
    samples = batch.global_batch_size
    return Planned(
        memory=memory,
        state=loads[0].state,
        model_flops=3 * asked.dense.profile.flops * samples,
        all_flops=model.sample_flops * samples,
        tokens=samples * config.model.sequence_length,
        parameters=asked.dense.profile.num_params,
        seconds=predict(model, Grid(1, 1), cluster).step_seconds or math.nan,
    )


def batches(size: int) -> tuple[str, ...]:
    """The settings of a batch of `MICROBATCHES`."""
    return (f"batch.microbatch_size={size}", f"batch.global_batch_size={size * MICROBATCHES}")


def chosen(training: Training, room: float, wanted: Sequence[int] = SIZES) -> Training:
    """The pruned training with the first of the `wanted` microbatch sizes that fits; ConfigError if
    none does. Activations are recomputed only where the last size does not fit otherwise."""
    least = math.inf
    for again, sizes in ((0, wanted), (1, wanted[-1:])):
        for size in sizes:
            tried = training.with_(*batches(size), f"pipeline.checkpoint_activations={again}")
            need = planned(tried, "samo").memory.total
            if need <= room:
                return tried
            least = min(least, need)
    raise ConfigError(
        f"{training.config}: needs {least / 1e9:.1f} GB at least, of {room / 1e9:.1f}; take a "
        "larger device"
    )


def mask_file(training: Training, folder: Path) -> Path:
    """Masks that cost no time: of every tensor the same positions in each stretch of `TILE`."""
    loaded = configure(training.config, training.all())
    asked = planned_model(loaded, load_cluster(CLUSTER))
    assert asked.targets is not None, "the configurations prune"
    generator = torch.Generator().manual_seed(1)
    tile = torch.zeros(TILE, dtype=torch.bool)
    tile[torch.randperm(TILE, generator=generator)[:TILE_KEPT]] = True

    @cache
    def mask(numel: int) -> Tensor:
        return tile.repeat(-(-numel // TILE))[:numel]

    shapes = asked.targets.shapes
    own = {name: partial(mask, math.prod(shape)) for name, shape in shapes.items()}
    alone = LocalTransport()
    path = folder / f"{Path(training.config).stem}-{asked.dense.profile.num_params}.safetensors"
    if not path.exists():
        write_masks(path, shapes, own, transport=alone, coords=Grid(1, 1).coords(0))
    return path
