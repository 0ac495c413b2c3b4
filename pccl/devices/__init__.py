"""Arrays on accelerators, which reach the network through host memory. Tests use a device made of threads."""
