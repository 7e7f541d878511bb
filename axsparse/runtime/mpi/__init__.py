"""The transport between processes over MPI."""
