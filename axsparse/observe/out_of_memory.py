"""The error of a rank that runs out of memory: what fills it, and what would free memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from axsparse.runtime.console import format_bytes
from axsparse.runtime.errors import TrainingError
from axsparse.samo.state_bytes import StateBytes


@contextmanager
def with_advice(
    where: Callable[[], str], state: Callable[[], StateBytes], predicted_bytes: float | None
) -> Iterator[None]:
    """Raise TrainingError in place of torch's own error if the memory of the GPU or, where the
    system limits it, of the process runs out in the block. It concerns this rank alone; `where`
    says what the rank was doing."""
    way = (
        "raise layout.g_inter, lower batch.microbatch_size, or set pipeline.checkpoint_activations"
    )
    try:
        with with_host_advice(where, way):
            yield
    except torch.cuda.OutOfMemoryError as error:  # torch 2.4 has no other name for it
        planned = ""
        if predicted_bytes is not None:
            planned = f", predicted peak {format_bytes(predicted_bytes)}"
        raise TrainingError(
            f"GPU memory ran out in {where()}: {format_bytes(torch.cuda.memory_allocated())} held, "
            f"{format_bytes(state().total)} of it model state{planned}; {way}"
        ) from error


@contextmanager
def with_host_advice(where: Callable[[], str], way: str) -> Iterator[None]:
    """Raise TrainingError, with a suggestion, in place of torch's or Python's own error if the
    process gets no more of the machine's memory in the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # torch has no class of its own for it.
        found = re.search(r"can't allocate memory: you tried to allocate (\d+) bytes", str(error))
        if not found and not isinstance(error, MemoryError):
            raise
        more = f": {format_bytes(int(found[1]))} more were wanted" if found else ""
        raise TrainingError(f"memory ran out in {where()}{more}; {way}") from error
