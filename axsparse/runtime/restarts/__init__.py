"""Starts the ranks of a run, watches their hosts, and starts again with those that are left."""
