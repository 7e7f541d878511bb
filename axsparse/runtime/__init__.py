"""What a rank stands on: errors, seeds, the grid of ranks, and the transports between them."""
