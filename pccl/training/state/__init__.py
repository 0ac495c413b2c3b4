"""The training state: what peers replicate and compare, and its files."""
