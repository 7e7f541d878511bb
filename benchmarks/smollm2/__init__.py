"""A published model pruned by three methods, evaluated by transformers, and trained on."""
