"""Samples and random numbers for each peer of a group that changes."""
