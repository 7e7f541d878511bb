"""torch.distributed.pipelining with several stages a rank: its zero-bubble schedules."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from peers.adamw import MaskedAdamW
from peers.contenders.contender import Seat
from peers.contenders.pipelining import groups_of
from peers.gpt import DTYPES, make_layers, mean_loss
from peers.workload import Run

CHUNKS = 2
"""Stages of a rank; the schedules in the form of a V need two."""
IN_LOOPS = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")
"""The ranks take the stages in turn; under other schedules the second turn goes backwards."""


def stages_of(schedule: str, rank: int, ranks: int) -> list[int]:
    """The numbers of a rank's stages, from the first on."""
    is_loop = schedule in IN_LOOPS
    return [rank, rank + ranks if is_loop else CHUNKS * ranks - 1 - rank]


class ZeroBubble:
    """A rank of one replica; the variant of the case is the name of torch's schedule."""

    def __init__(self, seat: Seat) -> None:
        run = seat.run
        case, ranks = run.case, run.case.stages
        self._last = CHUNKS * ranks - 1
        [group], _ = groups_of(ranks, 1)
        self._numbers = stages_of(case.variant, seat.rank, ranks)
        modules = {number: _chunk(run, number) for number in self._numbers}
        weights = [weight for module in modules.values() for weight in module.parameters()]
        self._optimizer = MaskedAdamW(weights, {})
        size, dtype = run.size, DTYPES[run.precision]
        stream = torch.zeros(1, size.tokens, size.width, dtype=dtype, requires_grad=True)
        words = torch.zeros(1, size.tokens, dtype=torch.long)
        logits = torch.zeros(1, size.tokens, size.vocabulary, dtype=dtype, requires_grad=True)
        stages = [
            PipelineStage(
                module,
                number,
                self._last + 1,
                torch.device("cpu"),
                input_args=stream if number else words,
                output_args=logits if number == self._last else stream,
                group=group,
            )
            for number, module in modules.items()
        ]

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            return mean_loss(logits, targets) / seat.share

        make = getattr(schedules, case.variant)
        self._schedule = make(stages, seat.share, loss_fn=loss, scale_grads=False)
        self._seat = seat

    def step(self, number: int) -> list[float]:
        self._optimizer.zero_grad()
        batch = self._seat.batch(number)
        inputs = (torch.cat([inputs for inputs, _ in batch]),) if 0 in self._numbers else ()
        losses: list[Tensor] = []
        if self._last in self._numbers:
            targets = torch.cat([targets for _, targets in batch])
            self._schedule.step(*inputs, target=targets, losses=losses, return_outputs=False)
        else:
            self._schedule.step(*inputs, return_outputs=False)
        self._optimizer.step()
        return [loss.item() * self._seat.share for loss in losses]


def _chunk(run: Run, number: int) -> nn.Module:
    """The layers of one stage, of `CHUNKS` times as many as there are ranks."""
    split = run.size.split(CHUNKS * run.case.stages)
    first = sum(split[:number])
    layers = make_layers(run.size, range(first, first + split[number]), run.precision)
    return nn.Sequential(*layers.values())


def start(seat: Seat) -> ZeroBubble:
    return ZeroBubble(seat)
