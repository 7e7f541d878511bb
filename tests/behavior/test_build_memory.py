"""The peak memory of building a stage, in addition to the memory that it leaves."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import gc, json, sys
from functools import partial
import torch
from torch import nn
from axsparse.models.layer import Layer
from axsparse.pruning.criteria import Criterion
from axsparse.pruning.distribution import kept_entries
from axsparse.pruning.methods.live_masks import ScoredMasks
from axsparse.samo.optim.adamw import ADAMW
from axsparse.samo.layer_construction import StateOptions, build_layers

def resident(key):
    line = next(line for line in open("/proc/self/status") if line.startswith(key))
    return int(line.split()[1]) * 1024

def init(name, shape, generator):
    return torch.empty(shape).normal_(0.0, 0.02, generator=generator)

def build(width, score, index):
    shapes = [(width, width), (width, 2 * width), (4 * width, width)]
    layers = [
        Layer(f"l{n}", partial(nn.Linear, *shape, bias=False), init=init)
        for n, shape in enumerate(shapes)
    ]
    kept = {f"l{n}.weight": kept_entries(a * b, 0.95) for n, (a, b) in enumerate(shapes)}
    options = StateOptions(torch.bfloat16, torch.bfloat16, ADAMW.moments, 1,
        ScoredMasks(Criterion(score), kept), index=index)
    return build_layers(layers, {}, options)

score, index = sys.argv[1:]
small = build(64, score, index)
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
WIDTH = 1280
layers = build(WIDTH, score, index)
print(json.dumps({"above": resident("VmHWM") - resident("VmRSS"), "largest": 16 * WIDTH**2}))
"""

BUILT_TWICE = """
import ctypes, gc, json, os
from functools import partial
import torch
from torch import nn
import axsparse as ax
from axsparse.runtime.local.local_transport import LocalTransport
from axsparse.runtime.local.local_world import LocalWorld
from axsparse.runtime.machine import resident_memory_bytes
from axsparse.runtime.job import Job
from axsparse.training.trainer import build

def init(name, shape, generator):
    return torch.randn(shape, generator=generator) * 0.02

def squares(output, targets):
    return (output - targets).float().square().sum()

def built(layers):
    linear = partial(nn.Linear, 1024, 1024, bias=False)
    model = ax.Model([ax.Layer(f"l{n}", linear, init=init) for n in range(layers)], loss=squares)
    data = ax.ArrayDataset(torch.zeros(8, 1024), torch.zeros(8, 1024))
    config = ax.configure({"precision": "bf16", "pruning": {"sparsity": 0.9},
        "batch": {"global_batch_size": 1, "microbatch_size": 1}, "optimizer": {"clip_norm": 0.0}})
    job = Job(LocalTransport(LocalWorld(1), 0))
    return build(job, model, lambda: ax.Datasets(data, None), config, quiet=True)

first = built(1)
first.close()
del first
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
before = resident_memory_bytes()
trainer = built(16)
print(json.dumps({"state": trainer.state_bytes().total, "held": resident_memory_bytes() - before}))
os._exit(0)
"""
"""The memory that the second build of a process leaves resident, and how much of it is state."""


def measured_by(program: str, *arguments: str, **environment: str) -> dict[str, int]:
    """The JSON that a program prints, in a separate process."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", **environment},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other libraries cannot be told")
def test_a_build_leaves_no_holes_between_what_stays() -> None:
    measured = measured_by(BUILT_TWICE)

    assert measured["held"] < 1.3 * measured["state"]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("score", "index"),
    [
        ("magnitude", "int32"),
        pytest.param("random", "mask", marks=pytest.mark.exhaustive),
    ],
)
def test_building_peaks_at_most_the_largest_parameter_in_fp32_above_what_it_leaves(
    score: str, index: str
) -> None:
    """Resident memory as the system sees it, with freed blocks given back at once."""
    measured = measured_by(PROGRAM, score, index, MALLOC_MMAP_THRESHOLD_="65536")

    assert 0 < measured["above"] <= measured["largest"]
