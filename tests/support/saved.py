"""Runs that save what they trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from support.oracle import Trace
from support.runs import token_data, train_here
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.models.layer import Model
from axsparse.runtime.grid import Grid
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.training.export.live_hf import save_hf
from axsparse.training.trainer import Trainer


def train_and_save(
    g_inter: int,
    g_data: int,
    model: Model,
    config: Config,
    path: Path,
    **how: Any,
) -> dict[str, Tensor]:
    """Train on all ranks and save; the masters by global name, dense, a tied one once."""
    world: LocalWorld[tuple[Trainer, Trace]] = LocalWorld(g_inter * g_data)

    def main(rank: int) -> tuple[Trainer, Trace]:
        transport = LocalTransport(world, rank)
        trainer, trace = train_here(transport, Grid(g_inter, g_data), model, config, token_data())
        save_hf(trainer, path, **how)
        return trainer, trace

    found = {}
    for trainer, trace in world.run(main):
        for layer in trainer.parts.layers:
            for tensor in layer.state.owned:
                if tensor.name not in trainer.parts.survey.ties:
                    dense = torch.zeros(tensor.parameter.numel())
                    dense[tensor.index.positions()] = trace.masters[tensor.name]
                    found[tensor.name] = dense.view_as(tensor.parameter)
    return found
