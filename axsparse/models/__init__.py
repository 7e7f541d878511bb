"""Models as lists of layers: what a model declares, and what is found out about it."""
