"""The observability of a run: the phases of a step, metrics.jsonl, traces, the screen, and
hangs."""
