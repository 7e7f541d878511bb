"""What a piece of work allocates, by the word of the allocators themselves."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes of torch at a time and the most of numpy and Python, of two calls."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        work()
    assert profiled.profiler is not None
    live = peak = 0
    events = profiled.profiler.kineto_results.events()
    for event in sorted(events, key=lambda event: int(event.start_ns())):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    tracemalloc.start()
    work()
    _, others = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak + others
