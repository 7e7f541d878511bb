"""torch's AdamW with square roots that are rounded to the nearest number.

torch takes square roots on CPUs from MKL, whose roots differ from the nearest numbers on some
processors; the package takes the nearest ones everywhere.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import Tensor


def nearest_root(values: Tensor) -> Tensor:
    """The root in fp64 is near enough that rounding it once more gives the nearest number."""
    return values.double().sqrt_().to(values.dtype)


class RoundedAdamW(torch.optim.AdamW):
    """Everything but the square roots is torch's own."""

    def step(self, closure: Any = None) -> Any:
        with mock.patch.object(Tensor, "sqrt", nearest_root):
            return super().step(closure)
