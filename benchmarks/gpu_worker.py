"""One training on one device, step by step as another process says: `gpu_train.py` starts it.

    python benchmarks/gpu_worker.py '{"config": "gpt3_2.7b.yaml", "overrides": ["train.steps=4"]}'

Each line on stdin is leave to take a step. Lines on stdout that begin with "@" are JSON: `built`,
a `step`, `done`. A step is over when the device has nothing left to do. With "profile": true the
last step has a summary of what torch's profiler saw of it.

Start values are a million random numbers over and over, made on the device: to draw one for each
of ten billion entries takes minutes, and no step is faster or slower by it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from axsparse.config.load import configure
from axsparse.data.sources import open_datasets
from axsparse.data_parallel.step_consensus import StepResult
from axsparse.models.layer import Model
from axsparse.models.zoo.model_registry import named_model
from axsparse.runtime.job import Job, run
from axsparse.training.trainer import build

MARK = "@"
DRAWN = 1 << 20
STD = 0.02
"""Of GPT's start values."""
LISTED = 25
"""Kernels of a profile that are listed, those that took longest."""
HAS_GPU = torch.cuda.is_available()


def tell(event: str, **values: Any) -> None:
    print(f"{MARK}{json.dumps({'event': event, **values})}", flush=True)


def wait_for_leave() -> float:
    """When it came; the end of this process, if the other one is gone."""
    if not sys.stdin.readline():
        sys.exit("gpu_worker: nobody gives leave any more")
    return time.perf_counter()


@cache
def drawn(device: str) -> Tensor:
    generator = torch.Generator(device).manual_seed(1)
    return torch.empty(DRAWN, device=device).normal_(0.0, STD, generator=generator)


def repeated(name: str, shape: tuple[int, ...], _: torch.Generator) -> Tensor:
    """Start values of a parameter: gains 1, biases 0, matrices the drawn numbers."""
    device = "cuda" if HAS_GPU else "cpu"
    if len(shape) == 1:
        gain = "norm" in name and name.endswith("weight")
        return torch.full(shape, float(gain), device=device)
    numel = int(torch.Size(shape).numel())
    values = torch.empty(numel, device=device)
    for start in range(0, numel, DRAWN):
        part = values[start : start + DRAWN]
        part.copy_(drawn(device)[: part.numel()])
    return values.view(shape)


def quick(model: Model) -> Model:
    """The same model with start values that cost nothing."""
    return replace(model, layers=[replace(layer, init=repeated) for layer in model.layers])


def settle() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def peaks() -> dict[str, int]:
    """Bytes of the device; nothing without one."""
    if not HAS_GPU:
        return {}
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }


def summary(profiler: profile, seconds: float) -> dict[str, Any]:
    """The kernels of the device in a profiled step of so many seconds, and which took longest."""
    kernels = [event for event in profiler.events() if event.device_type.name == "CUDA"]
    busy, reached = 0.0, 0.0
    for event in sorted(kernels, key=lambda event: event.time_range.start):
        busy += max(0.0, event.time_range.end - max(event.time_range.start, reached))
        reached = max(reached, event.time_range.end)
    host = [event for event in profiler.events() if event.device_type.name == "CPU"]
    launches = [event for event in host if "aunchKernel" in event.name]
    enqueued = max((e.time_range.end for e in launches), default=0.0) - min(
        (e.time_range.start for e in host), default=0.0
    )
    by_name: dict[str, list[float]] = {}
    for event in kernels:
        by_name.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e3)
    longest = sorted(by_name, key=lambda name: -sum(by_name[name]))[:LISTED]
    return {
        "seconds": seconds,
        "kernels": len(kernels),
        "device_busy_seconds": busy / 1e6,
        "enqueue_seconds": max(0.0, enqueued) / 1e6,
        "longest": {n: {"number": len(by_name[n]), "ms": sum(by_name[n])} for n in longest},
    }


def train(job: Job, spec: dict[str, Any]) -> None:
    loaded = configure(spec["config"], spec["overrides"])
    began = time.perf_counter()
    trainer = build(job, quick(named_model(loaded)), partial(open_datasets, loaded), loaded)
    settle()
    tell(
        "built",
        seconds=time.perf_counter() - began,
        state=asdict(trainer.state_bytes()),
        device=trainer.layers[0].state.gradient.device.type,
        peak=peaks(),
    )
    if HAS_GPU:
        torch.cuda.reset_peak_memory_stats()
    last = trainer.config.train.steps
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if HAS_GPU else [])]
    profiler = profile(activities=kinds) if spec.get("profile") else None
    start = wait_for_leave()

    def note(step: int, verdict: StepResult) -> None:
        nonlocal start
        settle()
        seconds = time.perf_counter() - start
        found: dict[str, Any] = {}
        if profiler is not None and step == last:
            profiler.stop()
            found["profile"] = summary(profiler, seconds)
        values = {"loss": verdict.loss, "finite": verdict.finite, **found}
        tell("step", step=step, seconds=seconds, **values)
        if step < last:
            start = wait_for_leave()
        if profiler is not None and step == last - 1:
            profiler.start()
            start = time.perf_counter()

    trainer.train(note)
    tell("done", peak=peaks())


if __name__ == "__main__":
    run(partial(train, spec=json.loads(sys.argv[1])))
