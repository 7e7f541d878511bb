"""Peak resident memory of training, SAMO against dense, and what the formulas say of it.

    python benchmarks/resident_memory.py [--save benchmarks/results/resident_memory.json]

Each variant trains a few steps in a process of its own. What is reported is the most that the
process has had resident (`VmHWM`), less what it had after a training of a tiny model of the
same kind: the interpreter, torch, numba, the code of kernels. Linux only.

Twice: with glibc's malloc as a run sets it, which gives freed blocks of 1 MiB and more back at
once while it builds, and keeps those below 32 MiB while it trains; and with the environment's
threshold of 1 MiB for all of it, so that what torch has freed is always the system's again.

Predicted, with nothing fitted: the state (`samo/state_bytes.py`); the activations of a
microbatch; and what one layer's backward has in hand, the largest dense gradient included.
For T tokens a microbatch, width h, V words and L blocks in bf16, in bytes:

    a block keeps    32·T·h    norm1: input and output 2+2, query, key and value 6, mixture 2,
                               norm2: input and output 2+2, fc1's output 8 and gelu's 8
    the head keeps   4·T·h + 10·T·V   norm: input and output; logits, in fp32, their softmax
    in hand          16·T·h + 8·h²    gradients of gelu's output and input; of fc1's weights
    in hand, pruned  8·f·h²           the kept entries of the latter, before they are added
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from peers.rank import forget_peak, own_bytes
from small_gpt import config_of, model_of, trainer_of

from axsparse.config.schema import Config
from axsparse.models.survey import survey
from axsparse.pruning.targets import find_targets
from axsparse.samo.state_bytes import StateFormat, stage_bytes
from axsparse.training.trainer import Trainer

HIDDEN, LAYERS, TOKENS, VOCABULARY, MICROBATCHES, SPARSITY, STEPS = 2048, 8, 512, 512, 2, 0.9, 3
WARM_UP_HIDDEN = 128
"""Of the tiny model: wide enough for tensors that numba reads, which it is loaded for."""
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "dense": {"enabled": False},
    "auto": {},
    "int32": {"index": "int32"},
    "mask": {"index": "mask"},
    "auto, split master": {"split_master": True},
    "auto, fp32 accumulation": {"gradient": "fp32"},
}


def train(config: Config) -> Trainer:
    """A few steps of a GPT on random tokens."""
    trainer = trainer_of(config)
    for _ in range(STEPS):
        trainer.step()
    trainer.close()
    return trainer


def activation_bytes(kept: float) -> dict[str, int]:
    """The formulas above."""
    T, h, V = TOKENS, HIDDEN, VOCABULARY
    return {
        "activations": LAYERS * 32 * T * h + 4 * T * h + 10 * T * V,
        "in_hand": 16 * T * h + 8 * h * h + int(8 * kept * h * h),
    }


def predicted_state(config: Config, gradient_dtype: torch.dtype) -> int:
    found = survey(model_of(config))
    return stage_bytes(
        found.layers,
        found.ties,
        find_targets(found, config.pruning).kept() if config.samo.enabled else {},
        StateFormat(
            half=True,
            gradient_bytes=gradient_dtype.itemsize,
            moments=2,
            index=config.samo.index,
            split_master=config.samo.split_master,
        ),
    ).total


def measure(name: str) -> dict[str, Any]:
    """Train one variant in this process: its peak, and what is predicted."""
    samo = VARIANTS[name]
    train(config_of(LAYERS, WARM_UP_HIDDEN, TOKENS, samo=dict(samo)))
    gc.collect()
    before = own_bytes("VmRSS")
    forget_peak()
    config = config_of(LAYERS, HIDDEN, TOKENS, samo=dict(samo))
    trainer = train(config)
    peak = own_bytes("VmHWM") - before
    gradient_dtype = trainer.parts.layers[0].state.gradient.dtype
    state = predicted_state(config, gradient_dtype)
    parts = activation_bytes(1 - SPARSITY if config.samo.enabled else 0.0)
    predicted = state + sum(parts.values())
    return {
        "peak_bytes": peak,
        "live_state_bytes": trainer.state_bytes().total,
        "predicted_state_bytes": state,
        **{f"predicted_{part}_bytes": value for part, value in parts.items()},
        "predicted_bytes": predicted,
    }


def measure_apart(name: str) -> dict[str, Any]:
    """One variant in processes of its own, with malloc as it is and with large blocks mapped."""
    command = [sys.executable, __file__, "--one", name]
    row: dict[str, Any] = {}
    for suffix, setting in (("", {}), ("_mapped", {"MALLOC_MMAP_THRESHOLD_": str(2**20)})):
        done = subprocess.run(  # noqa: S603
            command, capture_output=True, text=True, check=True, env={**os.environ, **setting}
        )
        found = json.loads(done.stdout.splitlines()[-1])
        peak, predicted = found.pop("peak_bytes"), found["predicted_bytes"]
        row |= {
            f"peak_bytes{suffix}": peak,
            f"measured_to_predicted{suffix}": round(peak / predicted, 4),
        }
    return {**row, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--one", choices=VARIANTS, help="measure one variant in this process")
    parser.add_argument("--save", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.one:
        print(json.dumps(measure(arguments.one)))
        return
    rows = {}
    print(f"{'MiB':24} predicted     peak  ratio   mapped  ratio")
    for name in VARIANTS:
        row = rows[name] = measure_apart(name)
        print(
            f"{name:24} {row['predicted_bytes'] / 2**20:9.1f} {row['peak_bytes'] / 2**20:8.1f} "
            f"{row['measured_to_predicted']:6.3f} {row['peak_bytes_mapped'] / 2**20:8.1f} "
            f"{row['measured_to_predicted_mapped']:6.3f}",
            flush=True,
        )
    ratio = rows["auto"]["peak_bytes"] / rows["dense"]["peak_bytes"]
    print(f"SAMO to dense: {ratio:.3f}")
    if arguments.save:
        model = {
            "model": f"GPT, {LAYERS} layers of width {HIDDEN}, {VOCABULARY} words, bf16, AdamW",
            "step": f"{MICROBATCHES} microbatches of {TOKENS} tokens, sparsity {SPARSITY}",
            "torch": torch.__version__,
        }
        result = {"what": model, "samo_to_dense": round(ratio, 4), "variants": rows}
        arguments.save.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
