"""The target that does not count in a loss."""

IGNORED = -100
"""The default of `torch.nn.functional.cross_entropy`."""
