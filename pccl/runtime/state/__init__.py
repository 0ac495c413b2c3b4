"""Shared state: comparison and transfer."""
