"""BLAKE3 as integer operations on torch tensors: the digests of blocks where they are, the same bits as anywhere.

A state on a GPU must be compared with those of other peers, whose tensors may be on CPUs. So that there is one digest
for all, and one that nobody can forge, this is BLAKE3 itself (https://github.com/BLAKE3-team/BLAKE3-specs) in 32-bit
additions, exclusive ors and shifts, element-wise over many chunks at once: no CUDA to build, and nothing that rounds.

How a block is hashed. Its *chunks* of 1024 bytes are compressed in 16 steps of 64 bytes, all chunks of a batch beside
each other; then pairs of chaining values are compressed to one until there is one for each block. The state of a
compression is four rows of four words; columns and diagonals are mixed four at a time.

Limits: blocks of 2**k chunks, k at least 1; what is shorter is for the CPU. Temporary memory is about a third of
BATCH_BYTES. A compression is some 370 small kernels and a batch of blocks of 1 MiB has 26 of them, so it takes the time
to launch 10,000 kernels, or to move some 250 times the batch through the device's memory, whichever is longer: for the
GPUs of data centres that is a few GB/s, which a newcomer's network does not come near.
"""

from __future__ import annotations

from typing import Any

CHUNK_BYTES = 1024
BATCH_BYTES = 256 << 20

_IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
_PERMUTATION = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_ROUNDS = 7
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT = 1, 2, 4, 8


def can_hash(block_bytes: int) -> bool:
    """Return whether blocks of this size can be hashed here: 2, 4, 8 ... whole chunks."""
    chunks = block_bytes // CHUNK_BYTES
    return block_bytes % CHUNK_BYTES == 0 and chunks >= 2 and chunks & (chunks - 1) == 0


def digests(torch: Any, data: Any, block_bytes: int) -> bytes:
    """Return the digests of the blocks of `data`, one after the other.

    `data` is a flat, contiguous uint8 tensor of whole blocks, of a size for which `can_hash` is true.
    """
    assert can_hash(block_bytes)
    assert data.numel() % block_bytes == 0
    batch_bytes = max(1, BATCH_BYTES // block_bytes) * block_bytes
    found = [_batch(torch, part, block_bytes) for part in data.split(batch_bytes) if part.numel()]
    return b"".join(each.cpu().numpy().astype("<i4", copy=False).tobytes() for each in found)


def _batch(torch: Any, data: Any, block_bytes: int) -> Any:
    chunks = block_bytes // CHUNK_BYTES
    blocks = data.numel() // block_bytes
    compress = _Compression(torch, data.device)
    words = _words(torch, data).view(blocks * chunks, 16, 16)
    number = torch.arange(chunks, dtype=torch.int32, device=data.device).repeat(blocks)
    values = compress.start(blocks * chunks)
    for step in range(16):
        flags = _CHUNK_START * (step == 0) | _CHUNK_END * (step == 15)
        values = compress(values, words[:, step, :].t(), number, flags)
    while values.shape[1] > blocks:
        # Chaining values are columns; a parent's message is the left child's eight words, then the right one's.
        pairs = values.view(8, -1, 2).permute(2, 0, 1).reshape(16, -1)
        flags = _PARENT | _ROOT * (pairs.shape[1] == blocks)
        values = compress(compress.start(pairs.shape[1]), pairs, None, flags)
    return values.t().contiguous()


def _words(torch: Any, data: Any) -> Any:
    """Return bytes as little-endian 32-bit words. One that does not begin at a multiple of four bytes is copied."""
    if data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32)


class _Compression:
    """BLAKE3's compression function over columns, with temporaries that are used again."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._iv = torch.tensor([_signed(word) for word in _IV], dtype=torch.int32, device=device).view(8, 1)
        order = list(range(16))
        orders = []
        for _ in range(_ROUNDS):
            # As the rounds take them: the columns' first and second words, then those of the diagonals.
            orders.append([order[i] for i in (0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15)])
            order = [order[i] for i in _PERMUTATION]
        self._orders = torch.tensor(orders, dtype=torch.int64, device=device)

    def start(self, columns: int) -> Any:
        """Return the chaining value that chunks and parents begin with."""
        return self._iv.expand(8, columns)

    def __call__(self, value: Any, message: Any, counter: Any, flags: int) -> Any:
        """Return the new chaining value of all columns.

        For each column `value` has 8 words, `message` 16, and `counter` the low word of the chunk's number (None: 0).
        """
        torch = self._torch
        columns = message.shape[1]
        a, b = value[:4].clone(), value[4:].clone()
        c = self._iv[:4].repeat(1, columns)
        d = torch.zeros_like(c)
        if counter is not None:
            d[0] = counter
        d[2], d[3] = 64, flags
        rest = torch.empty_like(c)
        words = torch.empty_like(message, memory_format=torch.contiguous_format)
        message = message.contiguous()
        for number in range(_ROUNDS):
            torch.index_select(message, 0, self._orders[number], out=words)
            self._mix(a, b, c, d, words[0:4], words[4:8], rest)
            b, c, d = b.roll(-1, 0), c.roll(-2, 0), d.roll(-3, 0)
            self._mix(a, b, c, d, words[8:12], words[12:16], rest)
            b, c, d = b.roll(1, 0), c.roll(2, 0), d.roll(3, 0)
        return torch.cat([a ^ c, b ^ d])

    def _mix(self, a: Any, b: Any, c: Any, d: Any, x: Any, y: Any, rest: Any) -> None:
        a.add_(b).add_(x)
        self._rotate(d.bitwise_xor_(a), 16, rest)
        c.add_(d)
        self._rotate(b.bitwise_xor_(c), 12, rest)
        a.add_(b).add_(y)
        self._rotate(d.bitwise_xor_(a), 8, rest)
        c.add_(d)
        self._rotate(b.bitwise_xor_(c), 7, rest)

    def _rotate(self, word: Any, bits: int, rest: Any) -> None:
        """Rotate to the right, in place. Shifts of int32 to the right bring in the sign, which is masked out."""
        torch = self._torch
        torch.bitwise_right_shift(word, bits, out=rest)
        rest.bitwise_and_((1 << (32 - bits)) - 1)
        word.bitwise_left_shift_(32 - bits).bitwise_or_(rest)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
