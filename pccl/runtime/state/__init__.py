"""Shared state: blocks and digests, and the transfer from donors to a newcomer."""
