"""The models that a configuration can name."""

from __future__ import annotations

from pathlib import Path

import torch
from support.images import shapes_of

from axsparse.config.load import configure
from axsparse.models.model_profile import profile
from axsparse.models.zoo.model_registry import named_model


def test_a_model_starts_at_the_file_that_the_configuration_names(tmp_path: Path) -> None:
    settings = ["model.num_layers=1", "model.hidden_size=8", "model.num_heads=2"]
    plain = named_model(configure(None, settings))
    state = {name: torch.zeros(shape) for name, shape in shapes_of(plain).items()}
    path = tmp_path / "gpt.pt"
    torch.save(state, path)

    model = named_model(configure(None, [*settings, f"model.weights={path}"]))

    assert profile(model).start.startswith("gpt.pt ")
