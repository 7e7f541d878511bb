"""SAMO: what is kept of each parameter, and how it is stored and updated."""
