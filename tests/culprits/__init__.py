"""Injects faults into real peers, and checks whom pccl names: see `__main__`."""
