"""What a rank says when its GPU has no memory left: what fills it, and what would make room."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch

from axsparse.runtime.console import format_bytes
from axsparse.runtime.errors import TrainingError
from axsparse.samo.state_bytes import StateBytes

HISTORY = 100_000
"""Allocations that a history goes back; a snapshot takes some kilobytes for each."""


def record_history() -> None:
    """Have torch remember from here on where in the code GPU memory was taken and given back."""
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=HISTORY)


@contextmanager
def explained(
    rank: int,
    where: Callable[[], str],
    state: Callable[[], StateBytes],
    predicted_bytes: float | None,
    folder: Path | None,
) -> Iterator[None]:
    """TrainingError in place of torch's own error where the current GPU's memory runs out, with
    a snapshot of all blocks in `folder`; both are this rank's alone. `where` says what was done."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:  # torch 2.4 has no other name for it
        wanted = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        asked = "" if wanted is None else f" ({wanted[1]} more were wanted)"
        planned = ""
        if predicted_bytes is not None:
            planned = f", predicted peak {format_bytes(predicted_bytes)}"
        raise TrainingError(
            f"GPU memory ran out in {where()}{asked}: "
            f"{_of_the_device()}; {_by_category(state())}{planned}; raise layout.g_inter, lower "
            "batch.microbatch_size, or set pipeline.checkpoint_activations"
            f"{_snapshot(rank, folder)}"
        ) from error


def _of_the_device() -> str:
    held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    return (
        f"{format_bytes(held)} held and {format_bytes(reserved)} reserved by torch, "
        f"{format_bytes(free)} free of the device's {format_bytes(total)}"
    )


def _by_category(state: StateBytes) -> str:
    parts = [f"{name} {format_bytes(size)}" for name, size in asdict(state).items() if size]
    return f"model state {format_bytes(state.total)} ({', '.join(parts) or 'none'})"


def _snapshot(rank: int, folder: Path | None) -> str:
    """Write it; what there is to say of it."""
    if folder is None:
        return ""
    path = folder / f"memory-rank{rank}.pickle"
    try:
        torch.cuda.memory._dump_snapshot(str(path))
    except OSError as error:
        return f"; {path} cannot be written ({error.strerror})"
    return f"; all blocks are in {path} (pytorch.org/memory_viz)"
