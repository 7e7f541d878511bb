"""A fully connected layer of which 90 % is pruned: dense kernels against sparse ones.

    python benchmarks/fig1_fc_layer.py [--device cuda]
        [--save benchmarks/results/fig1_fc_layer_cpu.json --machine "2 cores"]

The paper's Figure 1: 576 inputs, square weights from 128² to 4096². What SAMO does is "dense":
zeros are multiplied. The others are torch's sparse products (CSR and COO; on a GPU these are
cuSPARSE's) and, on a GPU, 2:4 semi-structured ones, which prune half. Sparse products get the
inputs as columns, which is what they like; dense ones get them as rows.

All kernels take turns in an order drawn anew for each round, and ratios are within a round.
On a CPU one thread, and seconds of the CPU, since a machine that is shared counts other
people's work into wall-clock time. Medians; brackets hold the quartiles. Backward is to the
inputs and to the kept weights.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor
from torch.nn import functional as F

BATCH = 576
SIZES = (128, 256, 512, 1024, 2048, 4096)
DENSITY = 0.1
EXIT_NO_DEVICE = 69
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}

Call: TypeAlias = Callable[[], Tensor]
Clock: TypeAlias = Callable[[Call], float]


def seconds_of_cpu(call: Call) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def seconds_of_gpu(call: Call) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    call()
    ended.record()
    ended.synchronize()
    milliseconds: float = began.elapsed_time(ended)
    return milliseconds / 1e3


def kernels(size: int, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Call, Call]]:
    """By name, the forward, and the forward with the backward."""
    generator = torch.Generator().manual_seed(size)
    mask = torch.rand(size, size, generator=generator) < DENSITY
    weight = (torch.randn(size, size, generator=generator) * mask).to(device, dtype)
    rows = torch.randn(BATCH, size, generator=generator).to(device, dtype)
    columns = rows.t().contiguous()
    layouts = {"csr": weight.to_sparse_csr(), "coo": weight.to_sparse_coo().coalesce()}
    found = {"dense": pair(lambda w, x: F.linear(x, w), weight, rows)}
    for name, sparse in layouts.items():
        found[name] = pair(torch.sparse.mm, sparse, columns)
    if device.type == "cuda" and dtype != torch.float32:
        halved = weight.view(size, -1, 4).clone()
        halved[..., 2:] = 0
        try:
            structured = torch.sparse.to_sparse_semi_structured(halved.view(size, size))
        except Exception as error:  # a library that is missing
            print(f"2:4 of {size}: {error}", file=sys.stderr)
        else:
            found["2:4"] = pair(torch.mm, structured, columns)
    return found


def pair(
    product: Callable[[Tensor, Tensor], Tensor], weight: Tensor, inputs: Tensor
) -> tuple[Call, Call]:
    def forward() -> Tensor:
        with torch.no_grad():
            return product(weight, inputs)

    def both() -> Tensor:
        leaves = weight.detach().requires_grad_(), inputs.detach().requires_grad_()
        outputs = product(*leaves)
        outputs.backward(torch.ones_like(outputs))
        return outputs

    return forward, both


def measure(calls: dict[str, Call], clock: Clock, rounds: int) -> dict[str, list[float] | str]:
    """Seconds of each round, or why there are none."""
    refused = {name: why for name, call in calls.items() if (why := refusal(call)) is not None}
    times: dict[str, list[float]] = {name: [] for name in calls if name not in refused}
    for number in range(rounds):
        order = list(times)
        random.Random(number).shuffle(order)  # noqa: S311  an order of measuring is no secret
        for name in order:
            times[name].append(clock(calls[name]))
    return times | refused


def refusal(call: Call) -> str | None:
    """Warms up; what torch says if it cannot do this."""
    try:
        call()
        call()
    except Exception as error:  # whatever it is, the other kernels are measured
        return next(iter(str(error).splitlines()), type(error).__name__)
    return None


def quartiles(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.4g}") for value in statistics.quantiles(values, n=4)]


def summary(times: dict[str, list[float] | str]) -> dict[str, dict[str, list[float] | str]]:
    """Milliseconds, and the ratio to the dense kernel in the same round."""
    base = times["dense"]
    rows: dict[str, dict[str, list[float] | str]] = {}
    for name, taken in times.items():
        if isinstance(taken, str) or isinstance(base, str):
            rows[name] = {"not supported": str(taken)}
        else:
            rows[name] = {
                "ms": quartiles([1e3 * value for value in taken]),
                "ratio": quartiles([v / b for v, b in zip(taken, base, strict=True)]),
            }
    return rows


def show(title: str, rows: dict[str, dict[str, list[float] | str]]) -> None:
    print(title)
    for name, row in rows.items():
        if "not supported" in row:
            print(f"  {name:6} not supported: {row['not supported']}", flush=True)
        else:
            each = [row["ms"], row["ratio"]]
            cells = [f"{values[1]} [{values[0]}, {values[2]}]" for values in each]
            print(f"  {name:6} {cells[0]:>32} ms   x dense {cells[1]:>26}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="of the weight's side")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--machine", default="unnamed", help="how the result calls it")
    parser.add_argument("--save", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("fig1_fc_layer: no CUDA device is here; run with --device cpu", file=sys.stderr)
        sys.exit(EXIT_NO_DEVICE)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*(Sparse CSR|semi_structured|sparse semi).*")
    device = torch.device(arguments.device)
    clock = seconds_of_gpu if device.type == "cuda" else seconds_of_cpu

    results = {}
    for precision, dtype in PRECISIONS.items():
        for size in arguments.sizes:
            made = kernels(size, dtype, device)
            for part, what in enumerate(("forward", "forward and backward")):
                title = f"{what}, {precision}, {size} x {size}"
                calls = {name: both[part] for name, both in made.items()}
                results[title] = summary(measure(calls, clock, arguments.rounds))
                show(title, results[title])
    if arguments.save:
        host: dict[str, object] = {
            "machine": arguments.machine,
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "one CPU thread",
            "torch": torch.__version__,
            "batch": BATCH,
            "density": DENSITY,
            "rounds": arguments.rounds,
        }
        lines = [f"{json.dumps(key)}: {json.dumps(rows)}" for key, rows in results.items()]
        head = f'"measured on": {json.dumps(host)}'
        arguments.save.write_text("{\n" + ",\n".join([head, *lines]) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
