"""The target that does not count in a loss."""

IGNORED = -100
"""As in `torch.nn.functional.cross_entropy`."""
