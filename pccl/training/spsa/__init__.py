"""SPSA: forward passes only, one byte from each peer in each step."""
