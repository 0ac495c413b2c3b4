"""Promela models of the protocol and what Spin is to find in them: see docs/design/model.md."""
