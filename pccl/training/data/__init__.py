"""Samples and random numbers for each peer of a changing group."""
