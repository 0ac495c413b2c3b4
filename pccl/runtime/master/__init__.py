"""Runs a master: the server, its standby, its files and what it computes aside."""
