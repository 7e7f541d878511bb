"""Whether an optimizer's compiled loop has, on this machine, the bits of its functions.

Where torch joins a multiplication and an addition into one rounding depends on the processor and
may depend on the version of torch. So a process holds the loop against the functions once, before
its first use, on numbers of all magnitudes. Either way gives the same training; the loop is faster.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from axsparse.samo import precision
from axsparse.samo.host.host_step import machine_code
from axsparse.samo.index.base import FullIndex
from axsparse.samo.optim.hyper import Hyper
from axsparse.samo.optim.optimizer import Block, Optimizer
from axsparse.samo.optim.tensor_slot import TensorSlot

TRIED = 4099
"""Numbers that are tried: an odd count, so that the last ones fill no vector."""


@lru_cache
def has_bits_of_functions(optimizer: Optimizer, *, is_half: bool) -> bool:
    """Whether the optimizer's loop is there and steps weights in half precision, or fp32 weights,
    as its functions do."""
    if machine_code() is None or optimizer.loop is None:
        return False
    hyper = Hyper(3, 1e-2, (0.9, 0.95), 1e-8, 0.1)
    dtype = torch.bfloat16 if is_half else torch.float32
    gradient, master = (_numbers(seed) for seed in range(2))
    moments = [_numbers(seed).abs() for seed in range(2, 2 + len(optimizer.moments))]
    gradient = gradient.to(dtype)
    own = [values.clone() for values in moments]
    block = Block(
        gradient.float().mul(0.3),
        master.clone(),
        dict(zip(optimizer.moments, own, strict=True)),
        is_half,
    )
    optimizer.update_moments(block, hyper)
    optimizer.apply(block, None, hyper)
    index, held = FullIndex(TRIED), range(TRIED)
    weight, stored = (torch.empty_like(gradient), master) if is_half else (master, None)
    optimizer.loop([TensorSlot(index, weight, gradient, stored, tuple(moments), held)], hyper, 0.3)
    rounded = precision.round_to(block.master, dtype)
    pairs = [(master, block.master), (weight, rounded), *zip(moments, own, strict=True)]
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


def _numbers(seed: int) -> Tensor:
    """fp32 numbers of either sign whose magnitudes are spread over twelve decades."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.rand(TRIED, generator=generator).mul_(12).sub_(10)
    return torch.randn(TRIED, generator=generator).mul_(torch.pow(10.0, exponents))
