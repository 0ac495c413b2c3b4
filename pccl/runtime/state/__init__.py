"""Comparison and transfer of the shared state."""
