"""The error of a rank whose GPU runs out of memory: what fills it, and what would free memory."""

from __future__ import annotations

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
    """Raise TrainingError in place of torch's own error if the GPU's memory runs out in the block.

    The error concerns this rank alone. `where` says what the rank was doing, `state` gives its
    bytes of model state.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:  # torch 2.4 has no other name for it
        planned = ""
        if predicted_bytes is not None:
            planned = f", predicted peak {format_bytes(predicted_bytes)}"
        raise TrainingError(
            f"GPU memory ran out in {where()}: {format_bytes(torch.cuda.memory_allocated())} held, "
            f"{format_bytes(state().total)} of it model state{planned}; raise layout.g_inter, "
            "lower batch.microbatch_size, or set pipeline.checkpoint_activations"
        ) from error
