"""Faults in real peer processes, and the peers that the master names for them."""
