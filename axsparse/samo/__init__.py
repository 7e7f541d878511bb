"""SAMO: the kept entries of each parameter, and how they are stored and updated."""
