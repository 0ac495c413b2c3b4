"""Data parallelism: gradients are averaged in every step, during the backward pass."""
