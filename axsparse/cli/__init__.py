"""The commands: each reads its options, calls the packages below, and prints the result."""
