"""Services for all other packages: errors, seeds, the grid of ranks, and transports between ranks.

Begin with `communication.py`, which describes transports, links and collectives.
"""
