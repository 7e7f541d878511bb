"""The error of a rank whose GPU runs out of memory: what fills it, and what would free memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import torch

from axsparse.runtime.console import format_bytes
from axsparse.runtime.errors import TrainingError
from axsparse.samo.state_bytes import StateBytes


@contextmanager
def with_advice(
    where: Callable[[], str], state: Callable[[], StateBytes], predicted_bytes: float | None
) -> Iterator[None]:
    """Raise TrainingError in place of torch's own error if the GPU's memory runs out in the block.

    The error concerns this rank alone. `where` says what the rank was doing, `state` gives its
    bytes of model state.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:  # torch 2.4 has no other name for it
        request = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
        asked = "" if request is None else f" ({request[1]} more were wanted)"
        held, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        free, total = torch.cuda.mem_get_info()
        own = state()
        kinds = [f"{name} {format_bytes(size)}" for name, size in asdict(own).items() if size]
        planned = ""
        if predicted_bytes is not None:
            planned = f", predicted peak {format_bytes(predicted_bytes)}"
        raise TrainingError(
            f"GPU memory ran out in {where()}{asked}: {format_bytes(held)} held "
            f"and {format_bytes(reserved)} reserved by torch, {format_bytes(free)} free of the "
            f"device's {format_bytes(total)}; model state {format_bytes(own.total)} "
            f"({', '.join(kinds) or 'none'}){planned}; raise layout.g_inter, lower "
            "batch.microbatch_size, or set pipeline.checkpoint_activations"
        ) from error
