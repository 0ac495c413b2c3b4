"""Data parallelism: gradients of every step, averaged during the backward pass."""
