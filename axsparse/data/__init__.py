"""Data: which samples a step sees is a pure function of (seed, step)."""
