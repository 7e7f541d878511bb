"""Time of a linear layer's three products, computed from kept entries, over that of dense ones.

    python benchmarks/sparse_products.py [--save benchmarks/results/sparse_products.json]

One thread, matrices of a GPT of width 512 and one of GPT-3 2.7B. A dense product (torch's; that of
the weight's gradient with the gather of its kept entries) and the sparse one take turns; both begin
with the same factors in the order that a step has them. Ratios are taken within a round; medians,
with quartiles in brackets. Needs numba and a CPU with AVX-512 BF16.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from figures import Figure, figure, host_machine
from torch import nn

from axsparse.samo.host.compiled_loops import has_bf16_loops
from axsparse.samo.host.sparse_products import sampled_product, sparse_input_gradient, sparse_linear
from axsparse.samo.index.base import Index, make_index

Product = tuple[Callable[[], object], Callable[[], object]]
Taken = tuple[list[float], list[float]]
ROUNDS = 21


@dataclass(frozen=True)
class Case:
    """A weight and its microbatch."""

    outputs: int
    inputs: int
    tokens: int
    density: float

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{self.outputs} × {self.inputs}, {self.tokens} tokens, {self.density:.0%} kept"


CASES = [
    *(Case(*shape, 256, 0.1) for shape in ((512, 512), (1536, 512), (2048, 512), (512, 2048))),
    *(Case(2048, 512, tokens, 0.1) for tokens in (64, 128, 1024)),
    *(Case(2048, 512, 256, density) for density in (0.02, 0.05, 0.2, 0.3, 0.4)),
    Case(10240, 2560, 1024, 0.1),
]


def contenders(case: Case) -> dict[str, Product]:
    """What takes turns, by name of the product: the dense one and the sparse one."""
    generator = torch.Generator().manual_seed(1)
    outer, rows = (
        torch.randn(case.tokens, size, generator=generator).to(torch.bfloat16)
        for size in (case.outputs, case.inputs)
    )
    mask = torch.rand(case.outputs * case.inputs, generator=generator) < case.density
    index: Index = make_index(mask, "mask")
    shape = case.outputs, case.inputs
    drawn = torch.randn(shape, generator=generator) * mask.view(shape)
    weight = drawn.to(torch.bfloat16)
    bias = torch.zeros(case.outputs, dtype=torch.bfloat16)
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


def measure(product: Product, rounds: int = ROUNDS) -> Taken:
    """Milliseconds of CPU of a dense and a sparse product in every round."""
    torch.set_num_threads(1)
    taken: Taken = ([], [])
    for number in range(-2, rounds):  # two to compile and to warm up
        for each, values in zip(product, taken, strict=True):
            began = time.process_time()
            each()
            if number >= 0:
                values.append(1e3 * (time.process_time() - began))
    return taken


def over_dense(taken: Taken) -> Figure:
    """The sparse product's time over the dense one's, in each round."""
    return figure("× dense", [sparse / dense for dense, sparse in zip(*taken, strict=True)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--save", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    if not has_bf16_loops():
        print("sparse_products: error: numba or AVX-512 BF16 is missing here", file=sys.stderr)
        return 2
    rows: dict[str, Any] = {}
    for case in CASES:
        rows[case.name] = {}
        told = []
        for name, product in contenders(case).items():
            taken = measure(product)
            dense, sparse = (figure("ms", values) for values in taken)
            ratio = over_dense(taken)
            rows[case.name][name] = {
                "dense": dense.row(),
                "sparse": sparse.row(),
                "ratio": ratio.row(),
            }
            low, high = ratio.quartiles
            told.append(
                f"{name} {dense.median:.2f} and {sparse.median:.2f} ms, "
                f"{ratio.median:.2f} [{low:.2f}, {high:.2f}]"
            )
        print(f"{case.name}: {'; '.join(told)}", flush=True)
    if arguments.save:
        result = {"machine": host_machine(), "rounds": ROUNDS, "cases": rows}
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        arguments.save.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
