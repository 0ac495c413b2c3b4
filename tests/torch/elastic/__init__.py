"""Ranks killed in training that goes on: the example, run and judged."""
