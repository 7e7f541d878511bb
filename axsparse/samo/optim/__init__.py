"""Optimizers over kept entries, and the learning rate, the loss scale and the norm for an
update."""
