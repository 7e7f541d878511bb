"""`axsparse doctor`: whether a machine, or all ranks of a launcher, can train."""
