"""Which entries of a tensor are kept: the encodings of their positions."""
