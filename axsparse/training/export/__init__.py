"""Exports trained weights in the formats of other libraries."""
