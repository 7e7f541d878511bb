"""Data sets, and the batches of each step: a pure function of (seed, step)."""
