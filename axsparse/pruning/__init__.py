"""Which entries are kept: masks from scores. Knows nothing of compressed storage."""
