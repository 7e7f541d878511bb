"""The transport of one process by itself, without MPI."""
