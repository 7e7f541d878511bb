"""Dense optimizers that the package's are compared with: torch's, and LAMB from its paper."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor

from axsparse.config.schema import OptimizerConfig


def nearest_root(values: Tensor) -> Tensor:
    """The root in fp64 is near enough that rounding it once more gives the nearest number."""
    return values.double().sqrt_().to(values.dtype)


class RoundedAdamW(torch.optim.AdamW):
    """torch's AdamW with square roots that are rounded to the nearest number, as the package takes
    them. On CPUs torch has them from MKL, whose roots differ from these on some processors."""

    def step(self, closure: Any = None) -> Any:
        with mock.patch.object(Tensor, "sqrt", nearest_root):
            return super().step(closure)


class DenseLamb(torch.optim.Optimizer):
    """LAMB word for word from the paper (You et al. 2020, algorithm 2), in fp64.

    It knows nothing of masks: what is zero, with a zero gradient, stays so and adds to no norm.
    """

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            (beta1, beta2), decay = group["betas"], group["weight_decay"]
            for x in group["params"]:
                state = self.state[x]
                if not state:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(x, dtype=torch.float64)
                    state["exp_avg_sq"] = torch.zeros_like(x, dtype=torch.float64)
                t = state["step"] = state["step"] + 1
                g = x.grad.double()
                m = state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * g
                v = state["exp_avg_sq"] = beta2 * state["exp_avg_sq"] + (1 - beta2) * g**2
                m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
                r = m_hat / (v_hat**0.5 + group["eps"])
                u = r + decay * x.double()
                x_norm, u_norm = x.double().norm().item(), u.norm().item()
                ratio = x_norm / u_norm if x_norm and u_norm else 1.0
                x.copy_(x.double() - group["lr"] * ratio * u)


def lamb(groups: list[dict[str, Any]], settings: OptimizerConfig) -> torch.optim.Optimizer:
    """For the oracle."""
    return DenseLamb(groups, settings.learning_rate, settings.betas, settings.eps)
