"""The watchdog ends a run that hangs, and names the rank that the others wait for."""
