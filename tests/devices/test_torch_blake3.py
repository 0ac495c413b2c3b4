"""BLAKE3 as a torch expression, held against the CPU's."""

from __future__ import annotations

import random
from typing import Any

import pytest
from blake3 import blake3

from pccl.devices import torch_blake3

torch = pytest.importorskip("torch")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
KIB = 1024


def tensor(data: bytes) -> Any:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def expected(data: bytes, block_bytes: int) -> bytes:
    return b"".join(blake3(data[i : i + block_bytes]).digest() for i in range(0, len(data), block_bytes))


@pytest.mark.parametrize("block_bytes", [2 * KIB, 4 * KIB, 64 * KIB])
@pytest.mark.parametrize("blocks", [1, 3])
def test_digests_are_those_of_the_cpu(block_bytes: int, blocks: int) -> None:
    for data in (random.Random(block_bytes).randbytes(blocks * block_bytes), bytes(blocks * block_bytes)):
        assert torch_blake3.digests(torch, tensor(data), block_bytes) == expected(data, block_bytes)


def test_extreme_words() -> None:
    words = (b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\xff\xff\xff\x7f", b"\1\0\0\0")
    data = b"".join(word * (KIB // 2) for word in words)
    assert torch_blake3.digests(torch, tensor(data), 2 * KIB) == expected(data, 2 * KIB)


def test_batches_and_places_within_a_tensor_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_blake3, "BATCH_BYTES", 5 * KIB)  # two blocks
    data = random.Random(1).randbytes(7 * 2 * KIB + 3)
    for start in range(3):
        place = slice(start, start + 7 * 2 * KIB)
        assert torch_blake3.digests(torch, tensor(data)[place], 2 * KIB) == expected(data[place], 2 * KIB)
    assert torch_blake3.digests(torch, tensor(data)[:0], 2 * KIB) == b""


def test_what_it_is_not_for() -> None:
    assert [torch_blake3.can_hash(size) for size in (KIB, 2 * KIB, 3 * KIB, 2 * KIB + 4, 1 << 20)] == [
        False,
        True,
        False,
        False,
        True,
    ]


@needs_gpu
def test_digests_of_a_gpu_are_those_of_the_cpu() -> None:
    data = random.Random(2).randbytes(5 << 20)
    assert torch_blake3.digests(torch, tensor(data).cuda(), 1 << 20) == expected(data, 1 << 20)
