"""Seconds a step of two ranks: tensor-parallel ranks, two stages, two replicas, and torch's
`parallelize_module` over gloo, with the same modules, tokens and start values.

    python benchmarks/tensor_parallel.py [--steps 8]

starts each contender as processes of its own, in turn, and prints the median of the steps after the
first two, and the loss of the first step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import axsparse as ax
from axsparse.data.order import samples_of_step
from axsparse.runtime.seeds import keyed_generator

BLOCKS, WIDTH, HEAD, TOKENS, WORDS, MICROBATCHES, SEED = 4, 512, 64, 256, 1024, 4, 1
PLAN: dict[str, ax.TpStyle | str] = {
    **dict.fromkeys(("query", "key", "value"), ax.TpStyle("colwise", unit=HEAD)),
    "out": ax.TpStyle("rowwise", unit=HEAD),
    "up": "colwise",
    "down": "rowwise",
}
OURS = {
    f"axsparse {kind} {shape}": (shape, {"enabled": kind == "SAMO"})
    for kind in ("dense", "SAMO")
    for shape in ("2x1x1", "1x2x1", "1x1x2")
}
"""By name: stages x tensor-parallel ranks x replicas, and section `samo`."""


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.word(tokens)
        return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        normed = self.norm1(x)
        query, key, value = (
            m(normed).view(b, s, -1, HEAD).transpose(1, 2)
            for m in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, s, -1))
        result: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return result


def init(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    if len(shape) == 1:
        return torch.full(shape, float("norm" in name and name.endswith("weight")))
    return torch.empty(shape).normal_(0.0, 0.02, generator=generator)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")


def tokens() -> ax.TokenDataset:
    random = np.random.default_rng(3)
    return ax.TokenDataset(
        "random", "0", WORDS, random.integers(0, WORDS, 64 * TOKENS + 1, dtype=np.uint16), TOKENS
    )


def layers() -> list[ax.Layer]:
    return [
        ax.Layer("embed", Embedding, kind="embedding", init=init),
        *(ax.Layer(f"block{n}", Block, init=init, tp_plan=PLAN) for n in range(BLOCKS)),
        ax.Layer("head", partial(nn.Linear, WIDTH, WORDS), kind="head", init=init),
    ]


def ours(name: str, steps: int, path: str) -> None:
    shape, samo = OURS[name]
    stages, members, replicas = map(int, shape.split("x"))
    layout = {"g_inter": stages, "g_tensor": members, "g_data": replicas}

    def main(job: ax.Job) -> None:
        config = ax.configure(
            {
                "batch": {"global_batch_size": MICROBATCHES, "microbatch_size": 1},
                "layout": layout,
                "precision": "fp32",
                "samo": samo,
                "pruning": {"sparsity": 0.9},
                "optimizer": {"clip_norm": 0.0},
                "train": {"steps": steps, "eval_steps": 0, "peak_flops": 1e11},
                "seed": SEED,
            }
        )
        found: list[tuple[float, float]] = []
        model = ax.Model(layers(), loss=loss)
        trainer = ax.build(job, model, lambda: ax.Datasets(tokens()), config, quiet=True)

        def note(_: int, verdict: Any) -> None:
            found.append((time.monotonic(), verdict.loss))

        trainer.train(note)
        if trainer.parts.place.rank == 0:
            Path(path).write_text(json.dumps(found))

    ax.run(main)


def torchs(steps: int, path: str) -> None:
    """Tensor parallelism as torch's tutorial has it, on two ranks."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{path}.meeting", world_size=2, rank=int(os.environ["RANK"])
    )
    mesh = init_device_mesh("cpu", (2,))
    modules = []
    for layer in layers():
        module = layer.build()
        with torch.no_grad():
            for local, parameter in module.named_parameters():
                generator = keyed_generator(SEED, f"{layer.name}.{local}", "init")
                parameter.copy_(init(local, tuple(parameter.shape), generator))
        if isinstance(module, Block):
            columns = dict.fromkeys(("query", "key", "value", "up"), ColwiseParallel())
            parallelize_module(
                module, mesh, {**columns, **dict.fromkeys(("out", "down"), RowwiseParallel())}
            )
        modules.append(module)
    model = nn.Sequential(*modules)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    data, found = tokens(), []
    for step in range(steps):
        total = 0.0
        optimizer.zero_grad()
        for sample in samples_of_step(len(data), MICROBATCHES, step, SEED):
            (inputs,), targets = data.read(np.array([sample]))
            value = loss(model(inputs.long()), targets.long()) / (MICROBATCHES * TOKENS)
            value.backward()
            total += value.item()
        optimizer.step()
        found.append((time.monotonic(), total))
    if os.environ["RANK"] == "0":
        Path(path).write_text(json.dumps(found))
    distributed.destroy_process_group()


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--steps", type=int, default=8)
    options.add_argument("--contender", help=argparse.SUPPRESS)
    options.add_argument("--to", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.contender == "torch":
        torchs(asked.steps, asked.to)
    elif asked.contender:
        ours(asked.contender, asked.steps, asked.to)
    else:
        for name in ("torch", *OURS):
            print(measured(name, asked.steps), flush=True)


def measured(name: str, steps: int) -> str:
    """A line about one contender."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "found.json")
        command = [
            sys.executable,
            __file__,
            "--steps",
            str(steps),
            "--contender",
            name,
            "--to",
            path,
        ]
        environment: dict[str, Any] = {**os.environ, "OMP_NUM_THREADS": "1"}
        if name == "torch":
            ranks = [
                subprocess.Popen(  # noqa: S603 - this script
                    command, env={**environment, "RANK": str(rank)}
                )
                for rank in (0, 1)
            ]
            assert [rank.wait() for rank in ranks] == [0, 0], name
        else:
            mpirun = str(Path(sys.executable).parent / "mpirun")
            whole = [mpirun, "-n", "2", *command]
            subprocess.run(whole, env=environment, check=True)  # noqa: S603 - this script
        found = json.loads(Path(path).read_text())
    ends = [end for end, _ in found]
    seconds = [after - before for before, after in itertools.pairwise(ends[1:])]
    return f"{name:38} {statistics.median(seconds):.3f} s  first loss {found[0][1]:.6f}"


if __name__ == "__main__":
    main()
