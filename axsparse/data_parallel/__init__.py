"""Data parallelism: how the replicas of a stage agree on gradients, weights and verdicts."""
