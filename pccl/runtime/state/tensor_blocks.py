"""A shared state as blocks and digests.

Contents are compared and transferred in blocks of BLOCK_BYTES. A tensor's digest is the BLAKE3 hash of its blocks'
digests; the elected root is the BLAKE3 hash of all digests with names, dtypes and shapes, except those of loose
tensors. Hashing uses a separate thread pool, because BLAKE3's own pool hangs in a forked child.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
from blake3 import blake3

from pccl.protocol import messages as m

BLOCK_BYTES = 2**20
DIGEST_BYTES = 32
UNKNOWN = bytes(DIGEST_BYTES)
"""The digest of a block with unknown content."""
SHARE_BLOCKS = 16
"""Number of blocks in one task of a hashing thread."""
THREADS_MAX = 32


class BlockMemory(Protocol):
    """Memory for a block that is being received."""

    @property
    def view(self) -> memoryview: ...

    def commit(self) -> None:
        """Make the view's content the block's content. Does not wait."""


class StoreError(Exception):
    """A device that holds a tensor has failed; the text names the device."""


class Store(Protocol):
    """The bytes of a tensor on a device. Methods that may wait are marked. Any method may raise StoreError."""

    @property
    def size_bytes(self) -> int: ...

    def digests(self) -> bytes:
        """Return the concatenated digests of all blocks. Waits."""

    def load(self, number: int) -> memoryview:
        """Return a copy of a block. Waits."""

    def memory_of(self, number: int) -> BlockMemory: ...

    def settle(self) -> None:
        """Wait until all committed blocks are visible to all users of the device."""


@dataclass(frozen=True)
class StateTensor:
    name: str
    dtype: str
    shape: tuple[int, ...]
    loose: bool
    data: memoryview
    """The tensor's bytes, contiguous and writable; empty if there is a store."""
    store: Store | None = None

    def offer(self) -> m.TensorOffer:
        return m.TensorOffer(self.name, self.dtype, list(self.shape), self.loose)

    @property
    def size_bytes(self) -> int:
        return len(self.data) if self.store is None else self.store.size_bytes

    @property
    def block_count(self) -> int:
        return -(-self.size_bytes // BLOCK_BYTES)

    def block(self, number: int) -> memoryview:
        return self.data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]

    def memory_of(self, number: int) -> BlockMemory:
        return InPlace(self.block(number)) if self.store is None else self.store.memory_of(number)


@dataclass(frozen=True, slots=True)
class InPlace:
    view: memoryview

    def commit(self) -> None:
        """Return immediately, because the block already has its content."""


@dataclass(frozen=True)
class Fingerprint:
    """Digests of a whole state at one moment."""

    blocks: tuple[bytes, ...]
    """For each tensor, its concatenated block digests."""
    root: bytes


def digest(data: bytes | bytearray | memoryview) -> bytes:
    return blake3(data).digest()


def digest_at(digests: bytes | bytearray, number: int) -> bytes:
    return bytes(digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])


def differing(mine: bytes | bytearray, theirs: bytes | bytearray) -> Sequence[int]:
    """Return the numbers of the blocks whose digests differ, ascending. Both arguments cover the same blocks."""
    assert len(mine) == len(theirs)
    assert len(mine) % DIGEST_BYTES == 0
    if mine == theirs:
        return ()
    words = [np.frombuffer(digests, np.uint64).reshape(-1, DIGEST_BYTES // 8) for digests in (mine, theirs)]
    found: Sequence[int] = np.flatnonzero((words[0] != words[1]).any(axis=1)).astype(np.uint32).data
    return found


def root_digest(tensors: Sequence[StateTensor], blocks: Sequence[bytes]) -> bytes:
    whole = blake3()
    for tensor, digests in zip(tensors, blocks, strict=True):
        if tensor.loose:
            continue
        head = f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0".encode()
        whole.update(len(head).to_bytes(8, "big") + head + blake3(digests).digest())
    return whole.digest()


def fingerprint(tensors: Sequence[StateTensor]) -> Fingerprint:
    """Return the digests of all tensors, which must not change during the call. Call this in a worker thread."""
    in_memory = [tensor for tensor in tensors if tensor.store is None]
    digests = iter(_hashed([tensor.block(number) for tensor in in_memory for number in range(tensor.block_count)]))
    blocks = tuple(
        tensor.store.digests() if tensor.store else b"".join(next(digests) for _ in range(tensor.block_count))
        for tensor in tensors
    )
    return Fingerprint(blocks, root_digest(tensors, blocks))


def _hashed(blocks: list[memoryview]) -> list[bytes]:
    threads = min(-(-len(blocks) // SHARE_BLOCKS), cores(), THREADS_MAX)
    if threads > 1:
        shares = [blocks[start : start + SHARE_BLOCKS] for start in range(0, len(blocks), SHARE_BLOCKS)]
        with suppress(RuntimeError), ThreadPoolExecutor(threads, "pccl-hash") as pool:
            return list(chain.from_iterable(pool.map(lambda share: [digest(block) for block in share], shares)))
    return [digest(block) for block in blocks]


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
