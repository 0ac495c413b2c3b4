"""Continuation of a run after the loss of its master: `machine` drives the other modules."""
