"""The `Device` for torch tensors on CUDA. torch is taken from `sys.modules`, not imported."""

from __future__ import annotations

import sys
from typing import Any

from pccl.devices.device import Event, HostMemory


class CudaEvent:
    """An `Event` of a CUDA stream."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()


class CudaMemory:
    """`HostMemory` in the form of a torch byte tensor on the CPU."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.address: int = tensor.data_ptr()


class CudaDevice:
    """A CUDA device. `api` is torch.cuda, or a stand-in for it."""

    def __init__(self, torch: Any, api: Any, device: Any) -> None:
        self._torch = torch
        self._api = api
        self._device = device
        self._reads = api.Stream(device)

    @property
    def name(self) -> str:
        return str(self._device)

    def allocate(self, size_bytes: int, pinned: bool) -> CudaMemory:
        try:
            with self._api.device(self._device):  # otherwise pinning would initialize another device
                # `device="cpu"`, because the program may have set another default.
                tensor = self._torch.empty(size_bytes, dtype=self._torch.uint8, device="cpu", pin_memory=pinned)
        except RuntimeError as error:
            raise MemoryError(str(error)) from None
        return CudaMemory(tensor)

    def empty(self, like: Any, shape: tuple[int, ...]) -> Any:
        return self._torch.empty(shape, dtype=like.dtype, device=self._device)

    def mark(self) -> CudaEvent:
        return self._record(self._api.current_stream(self._device))

    def read(self, array: Any, start_byte: int, size_bytes: int, to: HostMemory, after: Event | None) -> CudaEvent:
        assert isinstance(to, CudaMemory)
        with self._api.stream(self._reads):
            if after is not None:
                assert isinstance(after, CudaEvent)
                self._reads.wait_event(after.event)
            source = self._bytes(array)[start_byte : start_byte + size_bytes]
            to.tensor[:size_bytes].copy_(source, non_blocking=True)
            return self._record(self._reads)

    def write(self, array: Any, start_byte: int, size_bytes: int, source: HostMemory) -> CudaEvent:
        assert isinstance(source, CudaMemory)
        with self._api.device(self._device):
            target = self._bytes(array)[start_byte : start_byte + size_bytes]
            target.copy_(source.tensor[:size_bytes], non_blocking=True)
            return self._record(self._api.current_stream(self._device))

    def follow(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._api.current_stream(self._device).wait_event(event.event)

    def synchronize(self) -> None:
        self._api.synchronize(self._device)

    def _record(self, stream: Any) -> CudaEvent:
        event = self._api.Event(blocking=True)  # waiting threads sleep instead of spinning
        event.record(stream)
        return CudaEvent(event)

    def _bytes(self, array: Any) -> Any:
        return array.view(-1).view(self._torch.uint8)


_devices: dict[int, CudaDevice] = {}


def device_of(tensor: Any) -> CudaDevice | None:
    if tensor.device.type != "cuda":
        return None
    index = tensor.device.index
    if index not in _devices:
        torch = sys.modules["torch"]
        _devices.setdefault(index, CudaDevice(torch, torch.cuda, tensor.device))
    return _devices[index]
