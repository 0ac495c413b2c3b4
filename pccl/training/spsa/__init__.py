"""SPSA: forward passes alone, one byte from each peer and step."""
