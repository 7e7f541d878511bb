"""Predicts the memory and the time of a run before it runs, and chooses its layout."""
