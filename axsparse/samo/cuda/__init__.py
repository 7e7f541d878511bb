"""The same on a GPU: compression and the optimizer step, each as one kernel a tensor."""
