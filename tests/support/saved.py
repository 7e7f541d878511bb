"""Runs that save what they trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from support.resuming import Ran, ran, settings
from torch import Tensor

from axsparse.config.schema import Config
from axsparse.models.layer import Model
from axsparse.models.survey import survey
from axsparse.training.export import export


def train_and_save(
    layout: tuple[int, int], model: Model, config: Config, path: Path, *, trained: bool = False
) -> dict[str, Tensor]:
    """Train on all ranks and export for transformers; the masters, as `dense_state` has them."""
    run = path.with_name(f"{path.name}-run")
    found = ran(layout, settings(config, checkpoint={"every": 100}), run, model=lambda _: model)
    export(run, "hf", path, trained=trained)
    return dense_state(found, model)


def dense_state(found: Ran, model: Model, kind: str = "master") -> dict[str, Tensor]:
    """Trained parameters of a run by global name, a tied one once, and buffers."""
    surveyed = survey(model)
    tensors = {}
    for name, shape in surveyed.shapes.items():
        if f"kept/{name}" in found.state:
            values = found.state[f"{kind}/{name}"]
            if kind == "master":
                dense = torch.zeros(int(np.prod(shape)))
                dense[found.state[f"kept/{name}"]] = values
                values = dense
            tensors[name] = values.view(shape)
    return {**tensors, **found.buffers}
