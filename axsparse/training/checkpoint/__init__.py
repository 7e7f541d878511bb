"""What a run saves of itself, and how it goes on from that."""
