"""The peer's side of the control plane, without I/O: `machine` holds the whole, the other modules its parts."""
