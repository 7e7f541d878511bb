"""Optimizers over kept entries, and what an update needs beside them."""
