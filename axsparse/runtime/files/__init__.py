"""Files that survive a loss of power, the lock of a run directory, and the safetensors format."""
