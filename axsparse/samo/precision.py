"""The types of weights, and how fp32 masters are rounded to them.

The bits of a bf16 weight are (b + 0x8000) >> 16, where b are the bits of its fp32 master: rounded
to the nearest, ties away from zero. NaN stays NaN.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

DTYPES: Mapping[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""The type of weights in training, by `precision` of the configuration."""
_HALF_UNIT = 0x8000
_QUIET_NAN = 0x7FC0


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products of a type, as oneDNN says.

    Without them torch multiplies bf16 and fp16 by plain loops. Other processors than x86 are taken
    to have them.
    """
    checks = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    if dtype not in checks or platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return torch.backends.mkldnn.is_available() and bool(checks[dtype]())


def accumulates_in_half(microbatches: int) -> bool:
    """Whether `samo.gradient: auto` accumulates this number of microbatches in half precision: up
    to eight it errs by less than 0.4 %."""
    return microbatches <= 8


def round_to(values: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values in a weight's type: bf16 with ties away from zero, others as torch rounds.

    Returns `values` itself for fp32.
    """
    if dtype != torch.bfloat16:
        return values.to(dtype)
    high = ((values.view(torch.int32) + _HALF_UNIT) >> 16).to(torch.int16)
    # Rounding a NaN up could turn its bits into another number's.
    return high.masked_fill_(values.isnan(), _QUIET_NAN).view(torch.bfloat16)


def array_of(values: Tensor) -> NDArray[Any]:
    """A tensor on the host as numpy and compiled loops take it: one of two bytes as its bits, since
    numpy has no bf16."""
    array: NDArray[Any] = (values.view(torch.uint16) if values.itemsize == 2 else values).numpy()
    return array
