"""Optimizers over kept entries, and the learning rate and the norm of an update."""
