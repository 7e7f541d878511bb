"""Data parallelism over compressed gradients: the collectives and the synchronisation."""
