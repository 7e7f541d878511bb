"""torch.distributed.pipelining with 1F1B; with replicas, DDP within each stage."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

from peers.adamw import MaskedAdamW
from peers.contenders.contender import Seat
from peers.gpt import DTYPES, make_layers, masks_of, mean_loss


@functools.cache
def groups_of(stages: int, replicas: int) -> tuple[list[Any], list[Any]]:
    """The groups of each replica's stages and of each stage's replicas.

    Made once, since each has threads whose stacks would count under a cap.
    """
    ranks = [[stage * replicas + replica for replica in range(replicas)] for stage in range(stages)]
    pipelines = [dist.new_group(list(column)) for column in zip(*ranks, strict=True)]
    return pipelines, [dist.new_group(row) for row in ranks] if replicas > 1 else []


class Pipelining:
    def __init__(self, seat: Seat) -> None:
        run = seat.run
        stages, replicas = run.case.stages, run.case.replicas
        layers = make_layers(run.size, seat.layers, run.precision)
        masks = masks_of(run.size, layers, run.precision) if run.case.is_masked else {}
        model: nn.Module = nn.Sequential(*layers.values())
        self._optimizer = MaskedAdamW(model.parameters(), masks)
        pipelines, columns = groups_of(stages, replicas)
        if replicas > 1:
            model = DistributedDataParallel(
                model,
                process_group=columns[seat.stage],
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
            )
        self._is_first, self._is_last = seat.stage == 0, seat.stage == stages - 1
        size, dtype = run.size, DTYPES[run.precision]
        stream = torch.zeros(1, size.tokens, size.width, dtype=dtype, requires_grad=True)
        # With shapes given, the first step needs no additional forward to find them.
        stage = PipelineStage(
            model,
            seat.stage,
            stages,
            torch.device("cpu"),
            input_args=torch.zeros(1, size.tokens, dtype=torch.long) if self._is_first else stream,
            output_args=(
                torch.zeros(1, size.tokens, size.vocabulary, dtype=dtype, requires_grad=True)
                if self._is_last
                else stream
            ),
            group=pipelines[seat.replica],
        )

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return mean_loss(logits, targets) / seat.share

        # The loss is divided once, so that no pass over all gradients has to divide them.
        self._schedule = Schedule1F1B(stage, seat.share, loss_fn=loss, scale_grads=False)
        self._seat = seat

    def step(self, number: int) -> list[float]:
        self._optimizer.zero_grad()
        batch = self._seat.batch(number)
        inputs = (torch.cat([inputs for inputs, _ in batch]),) if self._is_first else ()
        losses: list[Tensor] = []
        if self._is_last:
            targets = torch.cat([targets for _, targets in batch])
            self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*inputs, return_outputs=False)
        self._optimizer.step()
        return [loss.item() * self._seat.share for loss in losses]


def start(seat: Seat) -> Pipelining:
    return Pipelining(seat)
