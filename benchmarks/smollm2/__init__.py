"""A published model pruned by three methods, judged by transformers, and trained on."""
