"""The peer's side of the control plane, without I/O. `machine` combines the parts in the other modules."""
