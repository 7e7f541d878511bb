"""Saves the present masks of a run as a ticket file."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from axsparse.models.survey import Survey
from axsparse.pruning.methods.live_masks import LiveMasks
from axsparse.pruning.ticket.ticket_writer import TicketOrigin, write_ticket
from axsparse.samo.tensor_state import TensorState


def save_live(live: LiveMasks, surveyed: Survey, path: Path, algorithm: str, step: int) -> None:
    """Write a ticket of the entries that are kept after `step` steps of the method `algorithm`.

    All ranks call this together. Raises OutputError on all ranks alike.
    """
    origin = TicketOrigin(
        algorithm=algorithm,
        step=step,
        seed=live.options.seed,
        parameters=surveyed.shapes,
        pruned=live.targets.shapes,
    )
    masks = {name: partial(_mask, tensor) for name, _, tensor in live.counted()}
    write_ticket(path, origin, masks, transport=live.transport, place=live.place)


def _mask(tensor: TensorState) -> Tensor:
    mask_D = torch.zeros(tensor.parameter.numel(), dtype=torch.bool)
    mask_D[tensor.positions()] = True
    return mask_D
