"""What a run tells: phases of a step, metrics.jsonl, the console."""
