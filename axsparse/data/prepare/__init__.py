"""axsparse data prepare: text files in, memory-mapped tokens out, restartable at any point."""
