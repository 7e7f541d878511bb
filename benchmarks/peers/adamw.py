"""One AdamW for all peers: torch's fused kernel on fp32 weights or on fp32 masters of bf16 ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1


def decay_of(parameter: Tensor) -> float:
    """Matrices decay, vectors do not."""
    return WEIGHT_DECAY if parameter.dim() >= 2 else 0.0


def groups_of(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """The parameters in groups of one weight decay each, as torch's optimizers take them."""
    trained = list(parameters)
    chosen = {decay: [p for p in trained if decay_of(p) == decay] for decay in (WEIGHT_DECAY, 0.0)}
    return [{"params": group, "weight_decay": decay} for decay, group in chosen.items() if group]


def torch_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.AdamW:
    """The fused optimizer of torch as users make it."""
    return torch.optim.AdamW(
        groups_of(parameters), lr=LEARNING_RATE, betas=BETAS, eps=EPS, fused=True
    )


class MaskedAdamW:
    """AdamW that may set pruned weights back to zero after each step.

    For bf16 it holds fp32 masters, and updates one tensor after the other, so that the fp32 copy
    of a gradient never exists for more than one.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], masks: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """`masks` are bool and true where an entry stays; tensors without one are dense."""
        self._parameters = list(parameters)
        self._masks = dict(masks)
        self._torch: torch.optim.AdamW | None = None
        with torch.no_grad():
            for parameter, mask in self._masks.items():
                parameter.mul_(mask)
        if self._parameters[0].dtype == torch.float32:
            self._torch = torch_adamw(self._parameters)
            return
        self._masters = [parameter.detach().float() for parameter in self._parameters]
        self._means = [torch.zeros_like(master) for master in self._masters]
        self._squares = [torch.zeros_like(master) for master in self._masters]
        self._updates = torch.zeros(())

    @torch.no_grad()
    def step(self) -> None:
        """One update with the gradients in `.grad`."""
        if self._torch is not None:
            self._torch.step()
            for parameter, mask in self._masks.items():
                parameter.mul_(mask)
            return
        self._updates += 1
        for number, parameter in enumerate(self._parameters):
            self._update(number, parameter)

    def _update(self, number: int, parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        master = self._masters[number]
        torch._fused_adamw_(
            [master],
            [parameter.grad.float()],
            [self._means[number]],
            [self._squares[number]],
            [],
            [self._updates],
            lr=LEARNING_RATE,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=decay_of(parameter),
            eps=EPS,
            amsgrad=False,
            maximize=False,
        )
        mask = self._masks.get(parameter)
        if mask is not None:
            master.mul_(mask)  # half the time of masked_fill_
        parameter.copy_(master)

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
