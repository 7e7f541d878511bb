"""Time of a linear layer's products by kept entries, over the time of dense ones: `make bench`.

One thread. A dense product (torch's; for the weight's gradient with the gather of its kept entries)
and the sparse one take turns; ratios are taken within a round. Needs numba and a CPU with AVX-512
BF16.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from figures import Figure, figure
from torch import nn

from axsparse.samo.host.sparse_products import sampled_product, sparse_input_gradient, sparse_linear
from axsparse.samo.index.base import Index, make_index

Product = tuple[Callable[[], object], Callable[[], object]]
Taken = tuple[list[float], list[float]]
ROUNDS = 21


def contenders(outputs: int, inputs: int, tokens: int, density: float) -> dict[str, Product]:
    """The products that take turns, by name: the dense one and the sparse one."""
    generator = torch.Generator().manual_seed(1)
    outer, rows = (
        torch.randn(tokens, size, generator=generator).to(torch.bfloat16)
        for size in (outputs, inputs)
    )
    mask = torch.rand(outputs * inputs, generator=generator) < density
    index: Index = make_index(mask, "mask")
    drawn = torch.randn(outputs, inputs, generator=generator) * mask.view(outputs, inputs)
    weight = drawn.to(torch.bfloat16)
    bias = torch.zeros(outputs, dtype=torch.bfloat16)
    return {
        "output": (
            lambda: nn.functional.linear(rows, weight, bias),
            lambda: sparse_linear(rows, weight, bias),
        ),
        "input gradient": (lambda: outer.mm(weight), lambda: sparse_input_gradient(outer, weight)),
        "weight gradient": (
            lambda: index.gather(outer.t().mm(rows).view(-1), 0, index.kept),
            lambda: sampled_product(outer, rows, index),
        ),
    }


def measure(product: Product) -> Taken:
    """Milliseconds of CPU of a dense and a sparse product in every round."""
    torch.set_num_threads(1)
    taken: Taken = ([], [])
    for number in range(-2, ROUNDS):  # two to compile and to warm up
        for each, values in zip(product, taken, strict=True):
            began = time.process_time()
            each()
            if number >= 0:
                values.append(1e3 * (time.process_time() - began))
    return taken


def over_dense(taken: Taken) -> Figure:
    """The sparse product's time over the dense one's, in each round."""
    return figure("× dense", [sparse / dense for dense, sparse in zip(*taken, strict=True)])
