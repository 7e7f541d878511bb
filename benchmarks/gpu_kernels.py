"""The kernels of SAMO on one GPU, against the bytes they have to move and against torch.

    python benchmarks/gpu_kernels.py [--save benchmarks/results/gpu_kernels.json]

Each kernel's bound is the time that the device's own copy takes for as many bytes: each read once
and written once, dense reads in full sectors of 32 bytes. The aim is 80 % of it, for compression,
for the step, and for the expansion of weights that are sparse at rest. "torch" does the same
unfused, with int32 positions. All take turns in an order drawn anew for each round. Medians;
brackets hold the quartiles. Without a GPU this ends with 69.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias, get_args

import torch
from gpu_report import EXIT_NO_DEVICE, quartiles
from torch import Tensor

from axsparse.samo.cuda import kernels
from axsparse.samo.cuda.device_index import DeviceIndex, make_device_index
from axsparse.samo.cuda.launch import CupyLauncher, Launcher
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.optim.optimizer import Hyper, TensorSlot
from axsparse.samo.optim.sgd import sgd
from axsparse.samo.precision import round_to
from axsparse.samo.shards import BLOCK
from axsparse.samo.state_bytes import MASTER_BYTES, MOMENT_BYTES, IndexKind, index_bytes

SECTOR = 32
"""Bytes that a GPU's memory moves at least."""
WEIGHT_BYTES, GRADIENT_BYTES = 2, 2
AIM = 0.8
HYPER = Hyper(step=5, learning_rate=1e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
FACTOR = 0.5
MOMENTUM = sgd(0.9, nesterov=False)
KINDS: tuple[IndexKind, ...] = get_args(IndexKind)

HEAD_START = 2_000_000
"""Cycles that the GPU sleeps ahead of each call, a millisecond: its host has then enqueued all of
the call, and what is measured is kernels and not launches."""

Call: TypeAlias = Callable[[], object]


# -- bounds ---------------------------------------------------------------------------------


def gathered_bytes(numel: int, density: float) -> float:
    """Of a dense half tensor, to read random kept entries of it: the sectors that have one."""
    return WEIGHT_BYTES * numel * (1 - (1 - density) ** (SECTOR // WEIGHT_BYTES))


def compress_bytes(numel: int, kept: int, kind: IndexKind) -> float:
    """Index and dense gradient in, kept gradient in and out, and in again for its squares."""
    dense = gathered_bytes(numel, kept / numel)
    return index_bytes(numel, kept, kind) + dense + 3 * GRADIENT_BYTES * kept


def step_bytes(numel: int, kept: int, kind: IndexKind, moments: int) -> float:
    """Index and gradient in, masters and moments in and out, the dense weight out."""
    state = MASTER_BYTES + MOMENT_BYTES * moments
    index = index_bytes(numel, kept, kind)
    return index + (GRADIENT_BYTES + 2 * state) * kept + WEIGHT_BYTES * numel


def expand_bytes(numel: int, kept: int, kind: IndexKind) -> float:
    """Index and masters in, the dense weight out."""
    return index_bytes(numel, kept, kind) + MASTER_BYTES * kept + WEIGHT_BYTES * numel


# -- what is measured -----------------------------------------------------------------------


def compress_and_judge(
    index: DeviceIndex, dense: Tensor, gradient: Tensor, partials: Tensor
) -> None:
    """A microbatch's gradient added to the kept one, and the squares of that summed."""
    kernels.compress(index, dense, gradient, accumulate=True)
    kernels.sum_squares(index.launch, [(gradient, partials)])


def unfused_compress(
    dense_D: Tensor, positions: Tensor, gradient_K: Tensor, squares: Tensor
) -> None:
    """In torch; the norm in fp32, which is what is usually done."""
    gradient_K.add_(dense_D.index_select(0, positions))
    squares.copy_(torch.linalg.vector_norm(gradient_K, dtype=torch.float32))


def unfused_step(
    weight_D: Tensor,
    positions: Tensor,
    gradient_K: Tensor,
    master_K: Tensor,
    mean_K: Tensor,
    square_K: Tensor,
) -> None:
    """AdamW in torch, as `samo/optim/adamw.py` has it, on the full tensor at once."""
    beta1, beta2 = HYPER.betas
    fresh = gradient_K.float().mul_(FACTOR)
    mean_K.lerp_(fresh, 1 - beta1)
    square_K.mul_(beta2).addcmul_(fresh, fresh, value=1 - beta2)
    master_K.mul_(1 - HYPER.learning_rate * HYPER.weight_decay)
    denominator = square_K.sqrt().div_(math.sqrt(1 - beta2**HYPER.step)).add_(HYPER.eps)
    rate = HYPER.learning_rate / (1 - beta1**HYPER.step)
    master_K.addcdiv_(mean_K, denominator, value=-rate)
    weight_D.index_put_((positions,), round_to(master_K, weight_D.dtype))


def calls(
    launch: Launcher, mask: Tensor, device: torch.device
) -> tuple[dict[str, Call], dict[str, float]]:
    """By name, what is measured, and the bytes that it has to move."""
    numel, positions = mask.numel(), mask.nonzero().view(-1).to(torch.int32)
    kept = positions.numel()
    half = torch.bfloat16
    weight = torch.zeros(numel, dtype=half, device=device)
    dense = torch.randn(numel, device=device).to(half)
    gradient = torch.zeros(kept, dtype=half, device=device)
    master, mean, square = (torch.zeros(kept, device=device) for _ in range(3))
    partials = torch.zeros(-(-kept // BLOCK), dtype=torch.float64, device=device)
    copied = torch.empty_like(dense)
    made: dict[str, Call] = {"copy": partial(copied.copy_, dense)}
    moved: dict[str, float] = {"copy": 2.0 * dense.nbytes}
    for kind in KINDS:
        index = make_device_index(launch, mask, kind)
        name = f"compress, {kind}"
        made[name] = partial(compress_and_judge, index, dense, gradient, partials)
        moved[name] = compress_bytes(numel, kept, kind)
        name = f"expand, {kind}"
        made[name] = partial(kernels.expand, index, master, weight)
        moved[name] = expand_bytes(numel, kept, kind)
        slot = TensorSlot(index, weight, gradient, master, (mean, square), range(kept))
        name = f"AdamW, {kind}"
        made[name] = partial(kernels.step, ADAMW, [slot], HYPER, FACTOR)
        moved[name] = step_bytes(numel, kept, kind, 2)
        slot = TensorSlot(index, weight, gradient, master, (mean,), range(kept))
        name = f"SGD with momentum, {kind}"
        made[name] = partial(kernels.step, MOMENTUM, [slot], HYPER, FACTOR)
        moved[name] = step_bytes(numel, kept, kind, 1)
    norm = torch.zeros((), device=device)
    made["compress, torch"] = partial(unfused_compress, dense, positions, gradient, norm)
    moved["compress, torch"] = compress_bytes(numel, kept, "int32")
    made["AdamW, torch"] = partial(unfused_step, weight, positions, gradient, master, mean, square)
    moved["AdamW, torch"] = step_bytes(numel, kept, "int32", 2)
    return made, moved


def measure(made: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    """Seconds of each round, after two to warm up."""
    times: dict[str, list[float]] = {name: [] for name in made}
    for number in range(-2, rounds):
        order = list(made)
        random.Random(number).shuffle(order)  # noqa: S311  an order of measuring is no secret
        for name in order:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(HEAD_START)
            began.record()
            made[name]()
            ended.record()
            ended.synchronize()
            if number >= 0:
                times[name].append(began.elapsed_time(ended) / 1e3)
    return times


def summary(
    times: dict[str, list[float]], moved: dict[str, float], numel: int
) -> dict[str, dict[str, object]]:
    """Milliseconds, bytes a parameter, and the share of the copy's bandwidth in the same round."""
    copies = [moved["copy"] / taken for taken in times["copy"]]
    return {
        name: {
            "ms": quartiles([1e3 * value for value in taken]),
            "bytes a parameter": round(moved[name] / numel, 3),
            "share of copy bandwidth": quartiles(
                [moved[name] / value / copy for value, copy in zip(taken, copies, strict=True)]
            ),
        }
        for name, taken in times.items()
    }


def show(rows: dict[str, dict[str, object]]) -> None:
    print(f"{'':28} {'ms':>24} {'bytes':>7} {'share of copy':>24}")
    for name, row in rows.items():
        print(
            f"{name:28} {row['ms']!s:>24} {row['bytes a parameter']!s:>7} "
            f"{row['share of copy bandwidth']!s:>24}"
        )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--numel", type=int, default=2**28, help="entries of the tensor")
    parser.add_argument("--density", type=float, default=0.1, help="of them, kept")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--save", type=Path, help="write JSON here")
    arguments = parser.parse_args(words)
    if not 0 < arguments.density < 1:
        parser.error(f"--density {arguments.density}: has to lie between 0 and 1")
    return arguments


def main(words: Sequence[str] | None = None) -> None:
    arguments = parse(words)
    if not torch.cuda.is_available():
        print("gpu_kernels: no CUDA device is here, and there is nothing else to measure")
        sys.exit(EXIT_NO_DEVICE)
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(1)
    mask = torch.rand(arguments.numel, generator=generator, device=device) < arguments.density
    made, moved = calls(CupyLauncher(0), mask, device)
    rows = summary(measure(made, arguments.rounds), moved, arguments.numel)
    show(rows)
    if arguments.save:
        host = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "numel": arguments.numel,
            "density": arguments.density,
            "rounds": arguments.rounds,
            "aim": AIM,
        }
        lines = [f"{json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items()]
        head = f'"measured on": {json.dumps(host)}'
        arguments.save.write_text("{\n" + ",\n".join([head, *lines]) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
