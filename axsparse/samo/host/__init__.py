"""Loops in machine code over the state of tensors on a CPU, where numba is installed."""
