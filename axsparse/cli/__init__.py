"""The commands: each reads its options, calls the rooms below, and prints the result."""
