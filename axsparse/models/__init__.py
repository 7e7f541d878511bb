"""Models as lists of layers: their declaration, and their profile."""
