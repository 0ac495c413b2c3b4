"""Runs a peer: drives the protocol machine with the master's messages, the engine's events and the user's calls."""
