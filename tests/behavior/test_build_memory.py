"""The peak memory of building a stage, in addition to the memory that it leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.exhaustive import by_default

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
from axsparse.samo.layer_state import StateTypes

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
    types = StateTypes(torch.bfloat16, torch.bfloat16, ADAMW.moments, index)
    options = StateOptions(types, 1, ScoredMasks(Criterion(score), kept))
    return build_layers(layers, {}, options)

score, index = sys.argv[1:]
small = build(64, score, index)
gc.collect()
open("/proc/self/clear_refs", "w").write("5")
WIDTH = 1280
layers = build(WIDTH, score, index)
print(json.dumps({"above": resident("VmHWM") - resident("VmRSS"), "largest": 16 * WIDTH**2}))
"""


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


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("score", "index"),
    by_default([], [("magnitude", "int32"), ("random", "mask")]),
)
def test_building_peaks_at_most_the_largest_parameter_in_fp32_above_what_it_leaves(
    score: str, index: str
) -> None:
    """Resident memory as the system sees it, with freed blocks given back at once."""
    measured = measured_by(PROGRAM, score, index, MALLOC_MMAP_THRESHOLD_="65536")

    assert 0 < measured["above"] <= measured["largest"]
