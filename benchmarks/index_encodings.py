"""Time of the index encodings: by themselves, and in a training step.

    python benchmarks/index_encodings.py [--save benchmarks/results/index_encodings.json]

One thread, one rank. All encodings take turns in an order that is drawn anew for each
round, and what is compared with int32 is the ratio within a round, so that a machine that
is busy for a while slows all alike. Times are medians; brackets hold the quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import Tensor

from axsparse.config.model_config import GptConfig, of_family
from axsparse.config.schema import Config
from axsparse.data.dataset import ArrayDataset, Datasets
from axsparse.models.zoo.gpt import gpt
from axsparse.runtime.job import Job
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.samo.host.compiled_loops import can_compile
from axsparse.samo.index import base
from axsparse.samo.index.base import FullIndex, Index, make_index
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import IndexKind
from axsparse.training.build import build
from axsparse.training.trainer import Trainer

NUMEL = 2048 * 2048
DENSITY = 0.1
ROTATION = 8
"""Tensors that take turns, so that none is found in the cache: a layer's gradient is fresh
from the matrix product, but its index was last read a microbatch ago."""
VARIANTS: Mapping[str, tuple[IndexKind, bool]] = {
    "int32": ("int32", False),
    "mask, numba": ("mask", True),
    "mask, numpy": ("mask", False),
}
"""Encoding, and whether it may be read by machine code."""
HIDDEN, LAYERS, MICROBATCHES, VOCABULARY = 1024, 2, 2, 512

Times: TypeAlias = dict[str, list[float]]


@dataclass
class Reading:
    """Stands in for `can_compile`: how the variant in turn is read."""

    variant: str = "int32"

    def __call__(self) -> bool:
        return VARIANTS[self.variant][1] and can_compile()

    def variants(self) -> list[str]:
        """Those that this environment can run."""
        installed = can_compile()
        return [name for name, (_, needs_numba) in VARIANTS.items() if installed or not needs_numba]


# -- by themselves ----------------------------------------------------------------------------


def time_operation(
    reading: Reading, dtype: torch.dtype, operation: str, extent: int | None, rounds: int
) -> Times:
    """Seconds of one operation over a whole tensor, in pieces of `extent` kept entries."""
    generator = torch.Generator().manual_seed(1)
    masks = [torch.rand(NUMEL, generator=generator) < DENSITY for _ in range(ROTATION)]
    dense = [torch.randn(NUMEL, generator=generator).to(dtype) for _ in range(ROTATION)]
    indices = {
        name: [make_index(mask, VARIANTS[name][0]) for mask in masks] for name in reading.variants()
    }
    values = [values_D[mask] for values_D, mask in zip(dense, masks, strict=True)]
    turns = cycle(range(ROTATION))
    times: Times = {name: [] for name in indices}
    for number in range(-2, rounds):  # two to warm up
        for name in shuffled(indices, number):
            turn = next(turns)
            index = indices[name][turn]
            reading.variant = name
            began = time.perf_counter()
            if operation == "gather":
                gather_all(index, dense[turn], extent)
            else:
                scatter_all(index, dense[turn], values[turn], extent)
            taken = time.perf_counter() - began
            if number >= 0:
                times[name].append(taken)
    return times


def gather_all(index: Index, dense_D: Tensor, extent: int | None) -> None:
    step = extent or index.kept
    for start in range(0, index.kept, step):
        index.gather(dense_D, start, min(start + step, index.kept))


def scatter_all(index: Index, dense_D: Tensor, values_K: Tensor, extent: int | None) -> None:
    step = extent or index.kept
    for start in range(0, index.kept, step):
        index.scatter(dense_D, values_K[start : start + step], start)


def shuffled(names: Mapping[str, Any], seed: int) -> list[str]:
    order = list(names)
    random.Random(seed).shuffle(order)  # noqa: S311  an order of measuring is no secret
    return order


# -- in a step ----------------------------------------------------------------------------------


def time_steps(reading: Reading, precision: str, tokens: int, rounds: int) -> Times:
    """Seconds of a training step, the same trainer with one encoding after another."""
    config = Config.model_validate(
        {
            "model": {
                "num_layers": LAYERS,
                "hidden_size": HIDDEN,
                "num_heads": 16,
                "sequence_length": tokens,
                "vocab_size": VOCABULARY,
            },
            "batch": {"global_batch_size": MICROBATCHES, "microbatch_size": 1},
            "precision": precision,
            "pruning": {"sparsity": 1 - DENSITY, "method": "random"},
            "train": {
                "steps": rounds * len(reading.variants()) + 1,
                "eval_every": 0,
                "peak_flops": 1e9,
            },
        }
    )
    data = ArrayDataset(
        torch.randint(VOCABULARY, (64, tokens)), torch.randint(VOCABULARY, (64, tokens))
    )
    world: LocalWorld[Times] = LocalWorld(1)
    [times] = world.run(
        lambda rank: _train(LocalTransport(world, rank), reading, config, data, rounds)
    )
    return times


def _train(
    transport: LocalTransport, reading: Reading, config: Config, data: ArrayDataset, rounds: int
) -> Times:
    settings = of_family(config.model, GptConfig)
    model = gpt(settings, settings.sequence_length)
    datasets = Datasets(data, None)
    trainer = build(Job(transport), model, lambda: datasets, config, quiet=True)
    encoded = {name: _encode(trainer, VARIANTS[name][0]) for name in reading.variants()}
    turns = [name for number in range(rounds) for name in shuffled(encoded, number)]
    times: Times = {name: [] for name in encoded}
    began = 0.0

    def change(step: int, _: object) -> None:
        nonlocal began
        if step > 1:  # the first step warms up
            times[turns[step - 2]].append(time.perf_counter() - began)
        if step <= len(turns):
            reading.variant = turns[step - 1]
            for tensor, index in encoded[reading.variant]:
                tensor.own_index = index
        began = time.perf_counter()

    trainer.train(on_step=change)
    return times


def _encode(trainer: Trainer, kind: IndexKind) -> list[tuple[Any, Index]]:
    """The pruned tensors with their masks in another encoding."""
    found = []
    for layer in trainer.parts.layers:
        for tensor in layer.state.owned:
            if not isinstance(tensor.index, FullIndex):
                mask = torch.zeros(tensor.parameter.numel(), dtype=torch.bool)
                mask[tensor.index.positions()] = True
                found.append((tensor, make_index(mask, kind)))
    return found


# -- report -------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    return [round(value, 4) for value in statistics.quantiles(values, n=4)]


def summary(times: Times) -> dict[str, dict[str, list[float]]]:
    """Milliseconds, and what comes on top of int32 in the same round."""
    base = times["int32"]
    return {
        name: {
            "ms": quartiles([1e3 * value for value in values]),
            "ratio": quartiles([v / b for v, b in zip(values, base, strict=True)]),
            "extra_ms": quartiles([1e3 * (v - b) for v, b in zip(values, base, strict=True)]),
        }
        for name, values in times.items()
    }


def show(title: str, rows: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    print(title)
    for name, row in rows.items():
        cells = "   ".join(
            f"{low:8.3f} {middle:8.3f} {high:8.3f}"
            for low, middle, high in (row["ms"], row["ratio"], row["extra_ms"])
        )
        print(f"  {name:14} {cells}", flush=True)


def machine() -> dict[str, object]:
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        cpu = names[0] if names else cpu
    try:
        numba = version("numba")
    except PackageNotFoundError:
        numba = "not installed"
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version("numpy"),
        "numba": numba,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=48, help="of each operation")
    parser.add_argument("--steps", type=int, default=24, help="of training, for each encoding")
    parser.add_argument("--save", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    host = machine()
    print(json.dumps(host))
    print(f"{'':14}   {'ms':^26}   {'ratio to int32':^26}   {'extra ms':^26}")
    reading = Reading()
    cases: dict[str, Callable[[], Times]] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for operation in ("gather", "scatter"):
            for extent in (None, BLOCK):
                title = (
                    f"{operation}, {str(dtype).removeprefix('torch.')}, "
                    f"{NUMEL} entries, {DENSITY} kept, "
                    + ("whole tensor" if extent is None else f"{extent} kept entries at a time")
                )
                cases[title] = partial(
                    time_operation, reading, dtype, operation, extent, arguments.rounds
                )
    for precision, tokens in [("bf16", 256), ("bf16", 1024), ("fp32", 256)]:
        title = (
            f"training step, {precision}, GPT of {LAYERS} layers of {HIDDEN}, "
            f"{MICROBATCHES} microbatches of {tokens} tokens"
        )
        cases[title] = partial(time_steps, reading, precision, tokens, arguments.steps)
    results = {}
    with (
        mock.patch.object(base, "can_compile", reading),
    ):
        for title, measure in cases.items():
            results[title] = summary(measure())
            show(title, results[title])
    if arguments.save:
        host["load at the end"] = [round(value, 2) for value in os.getloadavg()]
        counts = {"rounds": arguments.rounds, "steps": arguments.steps}
        lines = [
            f"{json.dumps(title)}: {{\n"
            + ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items())
            + "\n}"
            for title, rows in {"machine": host, "counts": counts, **results}.items()
        ]
        arguments.save.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
