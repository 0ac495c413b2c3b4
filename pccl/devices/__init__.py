"""Arrays on accelerators, which are transferred through host memory. Tests use a device simulated with threads."""
