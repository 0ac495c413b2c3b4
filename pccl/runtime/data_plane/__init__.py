"""Ops, and the engine that runs them."""
