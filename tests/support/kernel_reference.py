"""The results of kernels, in numpy: every operation of fp32 with its one rounding.

`samo/optim/adamw.py` and `samo/optim/sgd.py` say the same in torch, whose roundings depend on the
processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from axsparse.samo.cuda.launch import CHUNK, THREADS
from axsparse.samo.optim.optimizer import Hyper
from axsparse.samo.shards import BLOCK

Floats: TypeAlias = NDArray[np.float32]
Rule: TypeAlias = Callable[[Floats, Floats, list[Floats], Hyper], Floats]
"""`(master, gradient, moments, hyper)`: moves the moments in place and returns the master."""


def multiply_add(a: Floats | np.float32, b: Floats, c: Floats) -> Floats:
    """a·b + c with one rounding.

    The product is exact in fp64. Its sum with c is rounded to an odd last bit unless it is
    exact, and so rounds to fp32 as the exact sum does (Boldo and Melquiond 2008).
    """
    product, addend = a * b.astype(np.float64), c.astype(np.float64)
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    even = total.view(np.int64) & 1 == 0
    odd = np.where((error != 0) & even, np.nextafter(total, np.copysign(np.inf, error)), total)
    return odd.astype(np.float32)


def adamw(master: Floats, gradient: Floats, moments: list[Floats], hyper: Hyper) -> Floats:
    mean, square = moments
    beta1, beta2 = hyper.betas
    weight = np.float32(1 - beta1)
    if weight < 0.5:
        mean[:] = multiply_add(weight, gradient - mean, mean)
    else:
        mean[:] = multiply_add(weight - np.float32(1), gradient - mean, gradient)
    scaled = np.float32(1 - beta2) * gradient
    square[:] = multiply_add(scaled, gradient, square * np.float32(beta2))
    correction = np.float32(math.sqrt(1 - beta2**hyper.step))
    denominator = np.sqrt(square) / correction + np.float32(hyper.eps)
    rate = np.float32(-hyper.learning_rate / (1 - beta1**hyper.step))
    decayed: Floats = master * np.float32(1 - hyper.learning_rate * hyper.weight_decay)
    moved: Floats = decayed + rate * mean / denominator
    return moved


def sgd(momentum: float, *, nesterov: bool) -> Rule:
    def rule(master: Floats, gradient: Floats, moments: list[Floats], hyper: Hyper) -> Floats:
        direction = gradient
        if hyper.weight_decay:
            direction = multiply_add(np.float32(hyper.weight_decay), master, gradient)
        if momentum:
            moments[0][:] = moments[0] * np.float32(momentum) + direction
            if nesterov:
                direction = multiply_add(np.float32(momentum), moments[0], direction)
            else:
                direction = moments[0]
        return multiply_add(np.float32(-hyper.learning_rate), direction, master)

    return rule


def partials(gradient_K: Tensor) -> Tensor:
    """Sums of squares a block, in the order of `source/compress.cuh`."""
    values = gradient_K.float().numpy().astype(np.float64)
    blocks = -(-values.size // BLOCK)
    padded = np.zeros(blocks * BLOCK)
    padded[: values.size] = values
    each = padded.reshape(blocks, BLOCK // CHUNK, CHUNK // THREADS, THREADS // 32, 32)
    # A loop, since `sum` adds in pairs.
    lanes = _in_order(np.moveaxis(each * each, 2, 0))
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    chunks = _in_order(np.moveaxis(lanes[..., 0], 2, 0))
    return torch.from_numpy(_in_order(np.moveaxis(chunks, 1, 0)))


def _in_order(terms: NDArray[Any]) -> NDArray[Any]:
    total: NDArray[Any] = terms[0].copy()
    for term in terms[1:]:
        total += term
    return total
