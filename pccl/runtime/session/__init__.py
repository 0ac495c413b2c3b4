"""Runs a peer: passes the master's messages, the engine's events and the user's calls to the protocol machine."""
