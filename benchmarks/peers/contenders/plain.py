"""One process and plain torch: gradients accumulate over the microbatches."""

from __future__ import annotations

from torch import nn

from peers.adamw import MaskedAdamW
from peers.contenders.contender import Seat
from peers.gpt import make_layers, masks_of, mean_loss


class Plain:
    def __init__(self, seat: Seat) -> None:
        run = seat.run
        layers = make_layers(run.size, seat.layers, run.precision)
        masks = masks_of(run.size, layers, run.precision) if run.case.is_masked else {}
        self._model = nn.Sequential(*layers.values())
        self._optimizer = MaskedAdamW(self._model.parameters(), masks)
        self._seat = seat

    def step(self, number: int) -> list[float]:
        self._optimizer.zero_grad()
        losses = []
        for inputs, targets in self._seat.batch(number):
            loss = mean_loss(self._model(inputs), targets)
            (loss / self._seat.share).backward()
            losses.append(loss.item())
        self._optimizer.step()
        return losses


def start(seat: Seat) -> Plain:
    return Plain(seat)
