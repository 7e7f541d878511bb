"""Predicts training runs that others have published, and says how far the predictions are off."""
