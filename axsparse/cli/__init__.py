"""The commands: each reads its options, calls one of the rooms below, and prints what came out."""
