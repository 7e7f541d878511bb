"""The allocations of a piece of work, by the word of the allocators themselves."""

from __future__ import annotations

import tracemalloc
import warnings
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_of_torch(work: Callable[[], object]) -> int:
    """The most bytes that torch's allocator has handed out at a time."""
    with warnings.catch_warnings():
        # Some versions of torch warn of cycles, of which there is one here.
        warnings.filterwarnings("ignore", message=".*Profiler clears events")
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            work()
    assert profiled.profiler is not None
    live = peak = 0
    events = profiled.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: int(event.start_ns())):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def peak_of_numpy(work: Callable[[], object]) -> int:
    """The most bytes of Python and numpy at a time."""
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes of torch and the most of numpy and Python, of two calls."""
    return peak_of_torch(work) + peak_of_numpy(work)
