"""DistributedDataParallel over gloo: dense, masked after each step, or with torch.nn.utils.prune.

One process is plain torch. The variant `silent` leaves out DDP as well: replicas drift apart, and
its time is the least that data-parallel training can take.
"""

from __future__ import annotations

import contextlib

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from peers.adamw import MaskedAdamW
from peers.contenders.contender import Seat, prune_weights
from peers.gpt import make_layers, masks_of, mean_loss


class Ddp:
    def __init__(self, seat: Seat) -> None:
        run = seat.run
        layers = make_layers(run.size, seat.layers, run.precision)
        masks = masks_of(run.size, layers, run.precision) if run.case.is_masked else {}
        if run.case.masking == "prune":
            prune_weights(layers, masks)
            masks = {}
        model = nn.Sequential(*layers.values())
        self._optimizer = MaskedAdamW(model.parameters(), masks)
        silent = run.case.variant == "silent" or run.case.framework == "plain"
        # Gradients are views of the buckets, which spares a copy; buffers are the same on all
        # replicas, and nn.utils.prune's would otherwise be sent in every forward.
        self._model: nn.Module = (
            model
            if silent
            else DistributedDataParallel(
                model, gradient_as_bucket_view=True, broadcast_buffers=False
            )
        )
        self._seat = seat

    def step(self, number: int) -> list[float]:
        self._optimizer.zero_grad()
        losses = []
        batch = self._seat.batch(number)
        for count, (inputs, targets) in enumerate(batch, start=1):
            with self._alone() if count < len(batch) else contextlib.nullcontext():
                loss = mean_loss(self._model(inputs), targets)
                (loss / len(batch)).backward()
            losses.append(loss.item())
        self._optimizer.step()
        return losses

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        """No communication in this backward."""
        if isinstance(self._model, DistributedDataParallel):
            return self._model.no_sync()
        return contextlib.nullcontext()


def start(seat: Seat) -> Ddp:
    return Ddp(seat)
