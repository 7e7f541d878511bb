"""What a run tells: the phases of a step, metrics.jsonl, traces, the screen, and hangs."""
