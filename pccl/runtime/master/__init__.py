"""Runs a master."""
