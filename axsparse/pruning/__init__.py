"""Pruning: which entries of which tensors are kept, and when that changes during training."""
