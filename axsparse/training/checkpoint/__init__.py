"""Checkpoints: how a run saves its state, and how it resumes."""
