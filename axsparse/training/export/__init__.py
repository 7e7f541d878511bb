"""Trained weights in the formats of other libraries."""
