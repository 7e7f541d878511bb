"""Sums gradients and gathers weights over replicas; all ranks agree on a step's outcome."""
