"""The same on a GPU: compression and the optimizer step, each in one kernel."""
