"""Runs of the elastic example with killed ranks."""
