"""Models as lists of layers."""
