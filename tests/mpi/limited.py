"""Trains with no more memory than its plan says: `python limited.py PART KEY=VALUE ...`.

From where the layout is decided on, each rank may take PART of the predicted peak of the fullest
rank, in addition to what the process holds by then. The limit is on private writable memory
(RLIMIT_DATA), which counts what is reserved and never touched as well.
"""

from __future__ import annotations

import ctypes
import resource
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import axsparse.training.trainer
from axsparse.config.load import configure
from axsparse.config.model_config import GptConfig, of_family
from axsparse.config.schema import Config
from axsparse.data.dataset import ArrayDataset, Dataset, Datasets, TokenDataset
from axsparse.models.layer import Layer, Model
from axsparse.models.losses import summed_cross_entropy
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.job import Job, run
from axsparse.runtime.machine import M_MMAP_THRESHOLD, give_back_at_once
from axsparse.training.plan import RunPlan, plan_run
from axsparse.training.trainer import build

TINY = ("model.hidden_size=32", "model.num_heads=2", "batch.global_batch_size=2")
WIDE = "wide"
"""Given among the settings, it trains wide linear layers in place of a GPT."""
MOST_KEPT = 32 << 20
"""Bytes: larger blocks glibc gives back by default."""


def held_bytes() -> int:
    """Private writable memory of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return 1024 * int(line.split()[1])
    raise AssertionError("the system does not say")


def limited(part: float, *arguments: Any, **named: Any) -> RunPlan:
    """The result of `plan_run`; from here on memory is short."""
    decided = plan_run(*arguments, **named)
    assert decided.prediction is not None
    peak = decided.prediction.memory_bytes
    if decided.coords.rank == 0:
        print(f"predicted peak {peak:.0f}", flush=True)
    limit = held_bytes() + int(part * peak)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return decided


def drawn(_: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """A `Layer.init`."""
    return torch.zeros(shape).normal_(0.0, 0.01, generator=generator)


def example(samples: int) -> tuple[Tensor]:
    return (torch.zeros(samples, 3072, device="meta"),)


def subject(loaded: Config, *, is_wide: bool) -> tuple[Model, Dataset]:
    """A model, and a few samples that fit it."""
    if is_wide:
        sizes = {"embed": (3072, 1024), "wide": (1024, 25_088), "narrow": (25_088, 4096)}
        layers = [
            Layer(name, partial(nn.Linear, *size), init=drawn) for name, size in sizes.items()
        ]
        head = Layer("head", partial(nn.Linear, 4096, 1000), kind="head", init=drawn)
        data = ArrayDataset(torch.zeros(16, 3072), torch.arange(16) % 10)
        return Model([*layers, head], summed_cross_entropy, example=example), data
    model = of_family(loaded.model, GptConfig)
    length = model.sequence_length
    tokens = np.arange(40 * length + 1, dtype=np.uint16) % model.vocab_size
    return named_model(loaded), TokenDataset("counting", "0", model.vocab_size, tokens, length)


def steps(job: Job, overrides: list[str], number: int) -> None:
    """So many of them."""
    loaded = configure(None, [setting for setting in overrides if setting != WIDE])
    model, data = subject(loaded, is_wide=WIDE in overrides)
    trainer = build(job, model, lambda: Datasets(data, None), loaded, quiet=True)
    for _ in range(number):
        trainer.step()
    trainer.close()


def train(job: Job, part: float, overrides: list[str]) -> None:
    # A thread reserves its stack, 8 MB by default, unless that of one which has ended is free.
    threading.stack_size(1 << 20)
    # What libraries load and compile for a first step is theirs, and no plan's: in bf16 more than a
    # megabyte for each shape of a matrix product. It has to leave no holes that could be filled.
    assert give_back_at_once()
    vars(axsparse.training.trainer)["keep_freed_blocks"] = give_back_at_once
    precision = [setting for setting in overrides if setting.startswith("precision=")]
    small = [*TINY, *precision] if WIDE in overrides else overrides
    steps(job, [*small, "model.num_layers=1"], 1)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MOST_KEPT)
    vars(axsparse.training.trainer)["plan_run"] = partial(limited, part)
    steps(job, overrides, 2)


run(lambda job: train(job, float(sys.argv[1]), sys.argv[2:]))
