"""DeepSpeed's PipelineModule with ZeRO stage 1, on CPUs over gloo.

In bf16 it adds gradients in fp32 by default; the variant "bf16 sums" adds them in bf16.
"""

from __future__ import annotations

import logging
from typing import Any

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.utils import logger
from torch import Tensor, nn

from peers.adamw import torch_adamw
from peers.contenders.contender import Seat
from peers.gpt import make_layer, mean_loss
from peers.workload import Run


class BuiltLayer(nn.Module):
    """A layer of the model, built only on the stage that DeepSpeed places it on."""

    def __init__(self, run: Run, index: int) -> None:
        super().__init__()
        self.layer = make_layer(run.size, index, run.precision)

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.layer(values)
        return result


class CutModule(PipelineModule):  # type: ignore[misc]
    """A pipeline with the cuts that all contenders have."""

    def __init__(self, seat: Seat, **settings: Any) -> None:
        split = seat.run.size.split(seat.run.case.stages)
        self._bounds = [sum(split[:stage]) for stage in range(len(split) + 1)]
        super().__init__(**settings)

    def _partition_layers(self, method: str = "") -> None:  # noqa: ARG002  DeepSpeed gives it
        self.parts = self._bounds
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self._bounds[stage], stop=self._bounds[stage + 1])


class DeepSpeed:
    def __init__(self, seat: Seat) -> None:
        logger.setLevel(logging.ERROR)
        run = seat.run
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        model = CutModule(
            seat,
            layers=[LayerSpec(BuiltLayer, run, index) for index in range(run.size.layers)],
            num_stages=run.case.stages,
            loss_fn=mean_loss,
        )
        settings: dict[str, Any] = {
            "train_batch_size": run.size.microbatches,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": seat.share,
            "gradient_clipping": 0.0,
            "steps_per_print": 10**9,
            "zero_optimization": {"stage": 1, "overlap_comm": False},
            "zero_force_ds_cpu_optimizer": False,
        }
        if run.precision == "bf16":
            sums = "bf16" if run.case.variant == "bf16 sums" else "fp32"
            settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": sums}}
        self._engine = deepspeed.initialize(
            model=model, optimizer=torch_adamw(model.parameters()), config=settings
        )[0]
        self._seat = seat

    def step(self, number: int) -> list[float]:
        loss = self._engine.train_batch(data_iter=iter(self._seat.batch(number)))
        # The mean over all microbatches of all replicas, which every rank receives.
        return [loss.item()] if self._seat.rank == 0 else []


def start(seat: Seat) -> DeepSpeed:
    return DeepSpeed(seat)
