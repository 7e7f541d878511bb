"""What a recomputed layer holds between its forward and its backward: its inputs."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from axsparse.pipeline.layer_runner import LayerRunner


class Watched(nn.Module):
    """Has an activation whose end can be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.activations: list[weakref.ref[object]] = []

    def forward(self, x: Tensor) -> Tensor:
        activation = np.ones(x.shape, dtype=np.float32)
        self.activations.append(weakref.ref(activation))
        return x * self.weight * torch.from_numpy(activation)


@pytest.mark.parametrize("is_recomputed", [True, False])
def test_activations_are_recomputed_from_the_first_forward_on(is_recomputed: bool) -> None:
    module = Watched()
    layer = LayerRunner("layer", module, is_random=False, is_recomputed=is_recomputed)
    outputs = [layer.train((torch.ones(3),), (0, "layer", step, 0)) for step in range(2)]

    held = [activation() is not None for activation in module.activations]

    assert held == [not is_recomputed] * 2
    for (output,) in outputs:
        output.sum().backward()
    assert module.weight.grad is not None
    assert module.weight.grad.item() == 6
