"""A shared state as blocks and digests.

Contents are compared and moved in blocks of BLOCK_BYTES. A tensor's digest is the BLAKE3 of its blocks' digests; the
elected root is the BLAKE3 of all digests with names, dtypes and shapes, without loose tensors. A device tensor has a
`Store` that computes the same digests.

Hashing releases the GIL and uses every core with threads of its own: the thread pool of BLAKE3 would hang a forked
child.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from blake3 import blake3

from pccl.protocol import messages as m

BLOCK_BYTES = 2**20
DIGEST_BYTES = 32
UNKNOWN = bytes(DIGEST_BYTES)
"""The digest of a block with unknown content."""
SHARE_BYTES = 16 * 2**20
"""Number of bytes that a hashing thread takes at a time."""
THREADS_MAX = 32


class BlockMemory(Protocol):
    """Memory for a block that is being received."""

    @property
    def view(self) -> memoryview: ...

    def commit(self) -> None:
        """Make the content of the view the block's content. Does not wait."""


class StoreError(Exception):
    """A device that holds a tensor has failed; the text names it."""


class Store(Protocol):
    """The bytes of a tensor on a device. Methods that may wait say so. StoreError from any method."""

    @property
    def size_bytes(self) -> int: ...

    def digests(self) -> bytes:
        """Return the digests of all blocks, one after the other. Waits."""

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
    """The tensor's bytes, contiguous and writable; empty where there is a store."""
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
        """The block has its content already."""


@dataclass(frozen=True)
class Fingerprint:
    """Digests of a whole state at one moment."""

    blocks: tuple[bytes, ...]
    """The block digests of each tensor, one after the other."""
    root: bytes


def digest(data: bytes | bytearray | memoryview) -> bytes:
    return blake3(data).digest()


def digest_at(digests: bytes | bytearray, number: int) -> bytes:
    return bytes(digests[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES])


def differing(mine: bytes | bytearray, theirs: bytes | bytearray) -> Sequence[int]:
    """Return the numbers of the blocks whose digests differ, ascending. Both list the same number of blocks."""
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
    """Return the digests of all tensors, which must not change during the call. For a worker thread."""
    shares = list(_shares(tensors))
    digests = iter([each for share in _hashed(shares) for each in share])
    blocks = tuple(
        tensor.store.digests() if tensor.store else b"".join(next(digests) for _ in range(tensor.block_count))
        for tensor in tensors
    )
    return Fingerprint(blocks, root_digest(tensors, blocks))


def _shares(tensors: Sequence[StateTensor]) -> Iterator[list[memoryview]]:
    share: list[memoryview] = []
    size = 0
    for tensor in tensors:
        for number in range(tensor.block_count) if tensor.store is None else ():
            block = tensor.block(number)
            share.append(block)
            size += len(block)
            if size >= SHARE_BYTES:
                yield share
                share, size = [], 0
    if share:
        yield share


def _hashed(shares: list[list[memoryview]]) -> list[list[bytes]]:
    threads = min(len(shares), cores(), THREADS_MAX)
    if threads > 1:
        with suppress(RuntimeError), ThreadPoolExecutor(threads, "pccl-hash") as pool:
            return list(pool.map(_hash_share, shares))
    return [_hash_share(share) for share in shares]


def _hash_share(share: list[memoryview]) -> list[bytes]:
    return [digest(block) for block in share]


def cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
