"""Time of the kept entries of a weight's gradient, over that of the whole product.

    python benchmarks/sampled_product.py [--save benchmarks/results/sampled_product.json]

One thread, matrices of a GPT of width 512 and one of GPT-3 2.7B. The whole product (torch's, with
the gather of its kept entries) and the sampled one take turns; both begin with the same factors in
the order that a backward has them. Ratios are taken within a round; medians, with quartiles in
brackets. Needs numba and a CPU with AVX-512 BF16.
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
from figures import Figure, figure
from host_machine import host_machine

from axsparse.samo.host.sampled_product import sampled_product, sampling_loops
from axsparse.samo.index.base import Index, make_index

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
    *(Case(2048, 512, 256, density) for density in (0.02, 0.05, 0.2, 0.3)),
    Case(10240, 2560, 1024, 0.1),
]


def contenders(case: Case) -> dict[str, Callable[[], object]]:
    """What takes turns, by name."""
    generator = torch.Generator().manual_seed(1)
    outer, inner = (
        torch.randn(case.tokens, size, generator=generator).to(torch.bfloat16)
        for size in (case.outputs, case.inputs)
    )
    mask = torch.rand(case.outputs * case.inputs, generator=generator) < case.density
    index: Index = make_index(mask, "uint16")
    return {
        "whole": lambda: index.gather(outer.t().mm(inner).view(-1), 0, index.kept),
        "sampled": lambda: sampled_product(outer, inner, index),
    }


def measure(case: Case, rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Milliseconds of CPU of both in every round."""
    torch.set_num_threads(1)
    taken: dict[str, list[float]] = {"whole": [], "sampled": []}
    taking_turns = contenders(case)
    for number in range(-2, rounds):  # two to compile and to warm up
        for name, product in taking_turns.items():
            began = time.process_time()
            product()
            if number >= 0:
                taken[name].append(1e3 * (time.process_time() - began))
    return taken


def over_whole(taken: dict[str, list[float]]) -> Figure:
    """The sampled product's time over the whole one's, in each round."""
    pairs = zip(taken["sampled"], taken["whole"], strict=True)
    return figure("× whole", [sampled / whole for sampled, whole in pairs])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--save", type=Path, help="where to write the result")
    arguments = parser.parse_args()
    if sampling_loops() is None:
        print("sampled_product: error: numba or AVX-512 BF16 is missing here", file=sys.stderr)
        return 2
    rows: dict[str, Any] = {}
    for case in CASES:
        taken = measure(case)
        rows[case.name] = {
            **{name: figure("ms", values).row() for name, values in taken.items()},
            "ratio": over_whole(taken).row(),
        }
        row = rows[case.name]
        low, high = row["ratio"]["quartiles"]
        print(
            f"{case.name}: {row['whole']['median']:.2f} and {row['sampled']['median']:.2f} ms, "
            f"{row['ratio']['median']:.2f} [{low:.2f}, {high:.2f}]",
            flush=True,
        )
    if arguments.save:
        result = {"machine": host_machine(), "rounds": ROUNDS, "cases": rows}
        text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
        arguments.save.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
