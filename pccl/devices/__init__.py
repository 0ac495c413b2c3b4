"""Arrays on accelerators: how their elements reach the network, which reads and writes only this machine's memory.

    device         what is asked of a kind of device: a thin interface
    host_memory    the memory that copies go through: pinned, bounded, used again
    staging        one reduce of device arrays
    state_store    device arrays in a shared state
    torch_cuda     the interface for torch tensors on CUDA (and ROCm, which torch gives the same name)
    torch_blake3   BLAKE3 as torch operations: the digests of a state, computed where it is

Nothing here imports torch, and no other part of pccl knows what a stream is. Tests run the same code with a device made
of threads whose copies come late (`tests/support/fake_device.py`).
"""
