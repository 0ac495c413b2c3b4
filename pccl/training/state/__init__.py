"""The training state that peers replicate and compare, and its files."""
