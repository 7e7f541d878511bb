"""Makes the recorder of a run, and shows the banner."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from axsparse.config.validate import remarks
from axsparse.models.start_weights import FromFile
from axsparse.observe.banner import ModelLayout, banner
from axsparse.observe.metrics import open_records
from axsparse.observe.recorder import Recorder, RunFigures
from axsparse.observe.watchdog.slow_ranks import SlowRanks
from axsparse.planner.stage_memory import SMALL_BLOCKS
from axsparse.pruning.targets import initial_share, pruning_lines
from axsparse.runtime.console import format_bytes, format_count, make_console
from axsparse.runtime.exchange import gather_numbers, gather_values
from axsparse.runtime.files.run_folder import METRICS_FILE
from axsparse.runtime.machine import resident_memory_bytes
from axsparse.samo.backend import HOST
from axsparse.training.placement import Placement
from axsparse.training.plan import RunPlan
from axsparse.training.run_sources import Data

SLOW_STEPS = 20
"""Steps whose compute times are added up for `watchdog.slow_ratio`."""
LONG_ENOUGH = 0.3
"""Seconds of products, at least two, after which the peak is known."""


# Reason: what a run says of itself before its first step, in order.
def make_recorder(
    plan: RunPlan, live: int, taught: int, data: Data, placement: Placement, run_dir: Path | None
) -> Recorder:
    """The recorder of every rank; on rank 0 it has a screen, which shows the banner.

    `live` is the rank's model state in bytes, with the memory of expansions and without a teacher,
    which has `taught` bytes.
    """
    config, profile, transport = plan.config, plan.profile, placement.transport
    peak = config.train.peak_flops
    flops = matrix_peak(plan.dtype, placement.backend.device) if peak == "auto" else peak
    # The memory in addition to the model state, most of it libraries; that of the host does not
    # count where state and activations are on a GPU.
    overhead = 0.0
    if placement.gpu is None:
        overhead = max(0, resident_memory_bytes() - live - taught) + SMALL_BLOCKS
    rows = gather_numbers(transport, [live, flops, overhead, taught])
    states, peaks, overheads, teachers = zip(*rows, strict=True)
    predicted = plan.prediction
    peak_bytes = None if predicted is None else predicted.memory_bytes + max(overheads)
    sequences = config.batch.global_batch_size
    targets = data.training.targets_per_sample
    if targets is None:  # of a data set of torch, where some of them might not count
        targets = getattr(data.training.dataset, "targets_of_first", None)
    figures = RunFigures(
        steps=config.train.steps,
        log_every=config.train.log_every,
        tokens_per_step=sequences * (targets or 1),
        flops_per_step=3 * profile.flops * sequences,  # backward is twice the forward
        peak_flops=sum(peaks),
        unit=data.unit,
        predicted_memory_bytes=peak_bytes,
        predicted_step_seconds=None if predicted is None else predicted.step_seconds,
    )
    slow, watched = None, config.watchdog
    if run_dir is not None and watched.slow_ratio is not None:
        slow = SlowRanks(
            plan.coords.grid,
            [sum(profile.shares_of_work[layer] for layer in stage) for stage in plan.stages],
            gather_values(transport, socket.gethostname()),
            ratio=watched.slow_ratio,
            steps=SLOW_STEPS,
        )
    if run_dir is None or transport.rank != 0:
        return Recorder(transport.world, transport.backoff, figures, None, None)
    console = make_console(sys.stdout)
    layout = ModelLayout(
        plan.model.name,
        profile,
        plan.stages,
        plan.coords.grid,
        transport.name,
        dense_bytes=max(plan.state_bytes(plan.layers_of(n), {}) for n in range(len(plan.stages))),
        live_bytes=int(max(states)),
        teacher_bytes=int(max(teachers)),
        has_saved_masks=plan.targets is not None and plan.targets.mask_file is None,
    )
    lines = banner(
        config,
        layout,
        data=f"{data.entry.name}: {format_count(data.training.num_samples)} samples",
        metrics=run_dir / METRICS_FILE,
        planned="" if peak_bytes is None else _planned(plan, peak_bytes),
    )
    start = plan.model.start
    note = start.note() if isinstance(start, FromFile) else ""
    notes = (*filter(None, [note]), *remarks(config, data.training.num_samples))
    pruned: Sequence[str] = ()
    if plan.targets is not None:
        stays = plan.starts_pruned and not initial_share(config.pruning)
        saved = plan.kept_at_start if stays else None
        pruned = pruning_lines(profile, plan.targets, config.pruning, saved)
    for line in (*placement.table, *lines, *notes, *pruned):
        console.line(line)
    file = open_records(config, run_dir.absolute(), run_dir / METRICS_FILE)
    return Recorder(transport.world, transport.backoff, figures, file, console, slow)


def _planned(plan: RunPlan, memory_bytes: float) -> str:
    """The banner's text on the prediction; `memory_bytes` is the predicted peak of a rank."""
    prediction = plan.prediction
    assert prediction is not None, "it has a peak"
    text = f"peak of a rank ~{format_bytes(memory_bytes)}"
    if prediction.step_seconds is not None:
        text += f" · step ~{prediction.step_seconds:.3g} s"
    if prediction.sum_bytes:
        text += f" · a tensor-parallel rank sends {format_bytes(prediction.sum_bytes)} a step"
    if plan.memory_is_tight:
        text += ", which is tight: freed memory goes back at once, at some 8 % of the time"
    if plan.layout_reason is not None:
        text += f" · {plan.layout_reason}"
    return text


def matrix_peak(dtype: torch.dtype, device: torch.device = HOST.device) -> float:
    """Flop/s of a square matrix product in this rank, the best of a few."""
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 1024
    left = torch.ones(size, size, dtype=dtype, device=device)
    best, first = float("inf"), time.perf_counter()
    for number in range(4):
        began = time.perf_counter()
        torch.mm(left, left)
        if on_gpu:
            torch.cuda.synchronize(device)
        ended = time.perf_counter()
        best = min(best, ended - began)
        # The first product loads libraries, too. Slow are those of bf16 without its instructions.
        if number > 0 and ended - first > LONG_ENOUGH:
            break
    return 2 * size**3 / best
