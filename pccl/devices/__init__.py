"""Arrays on accelerators, which reach the network through host memory.

    device         the interface of a device
    host_memory    a pool of pinned host memory
    staging        one op on device arrays
    state_store    device arrays in a shared state
    torch_cuda     the interface for torch tensors on CUDA (and ROCm, which torch gives the same name)

These modules do not import torch, and the rest of pccl does not know about streams. Tests use a device made of threads
whose copies are late (`tests/support/fake_device.py`).
"""
