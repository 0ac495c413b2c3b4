"""State transfers between two or more parties joined by sockets."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import cast

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.runtime.network.links import LinkError
from pccl.runtime.network.wire import ConnectionLost, receive_message, send_message
from pccl.runtime.state import tensor_blocks
from pccl.runtime.state import transfer as transfer_module
from pccl.runtime.state.tensor_blocks import StateTensor, fingerprint
from pccl.runtime.state.transfer import PATIENCE_S, STALL_S, Transfer, TransferError

BLOCK = 64
BOUND_S = 60
VIRTUAL_BOUND_S = 20
"""Time that a transfer may take, by a clock that a busy machine cannot make late."""
CONNECTIONS = 3

Serve = Callable[[trio.socket.SocketType], Awaitable[None]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_blocks, "BLOCK_BYTES", BLOCK)


@pytest.fixture
def many_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than donors tell unasked."""
    monkeypatch.setattr(transfer_module, "DIGESTS_UNASKED_BYTES_MAX", 0)


def state(*contents: bytes, loose: Sequence[int] = ()) -> list[StateTensor]:
    return [
        StateTensor(f"t{i}", "UINT8", (len(content),), i in loose, memoryview(bytearray(content)))
        for i, content in enumerate(contents)
    ]


def contents(transfer: Transfer) -> list[bytes]:
    return [bytes(tensor.data) for tensor in transfer.tensors]


def transfer_of(tensors: list[StateTensor]) -> Transfer:
    return Transfer(tensors, fingerprint(tensors))


def plan_for(donor: Transfer, loose: bool = False) -> m.SyncPlan:
    return m.SyncPlan(1, 7, donor.own.root, [], True, loose)


def member(number: int) -> m.PeerInfo:
    return m.PeerInfo(number, 0, ["10.0.0.1"], 1, CONNECTIONS)


def fetch(
    receiver: Transfer,
    plan: m.SyncPlan,
    donors: Sequence[Serve | None],
    clock: trio.abc.Clock | None = None,
    bound_s: float | None = None,
) -> list[tuple[int, str]]:
    """Runs a fetch from donors numbered 1, 2, ...; None cannot be reached."""

    async def body() -> list[tuple[int, str]]:
        async def serve(donor: Serve, sock: trio.socket.SocketType) -> None:
            with sock:
                try:
                    await donor(sock)
                except (ConnectionLost, ProtocolError, OSError):
                    return

        async def connect(wanted: m.PeerInfo, tells: bool) -> trio.socket.SocketType:
            donor = donors[wanted.peer - 1]
            if donor is None:
                raise LinkError("connection refused")
            ours, theirs = trio.socket.socketpair()
            nursery.start_soon(serve, donor, theirs)
            if tells:
                nursery.start_soon(ask_for_digests, ours)
            return ours

        async def ask_for_digests(sock: trio.socket.SocketType) -> None:
            """Any donor of these tests tells them so."""
            with contextlib.suppress(ConnectionLost):
                for index, tensor in enumerate(receiver.tensors):
                    if not tensor.loose:
                        await send_message(sock, m.DigestRequest(index))

        suspects: list[tuple[int, str]] = []
        failure: TransferError | None = None
        with trio.fail_after(bound_s or (BOUND_S if clock is None else VIRTUAL_BOUND_S)):
            async with trio.open_nursery() as nursery:
                try:
                    suspects = await receiver.fetch(plan, [member(i + 1) for i in range(len(donors))], connect)
                except TransferError as error:
                    failure = error
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return suspects

    return trio.run(body, clock=clock)


class _Dying:
    """A socket of somebody who dies after so many bytes."""

    def __init__(self, sock: trio.socket.SocketType, budget: int) -> None:
        self._sock = sock
        self._budget = budget

    async def recv_into(self, view: memoryview) -> int:
        return await self._sock.recv_into(view)

    async def send(self, data: memoryview) -> int:
        if not self._budget:
            raise OSError("died")
        sent = await self._sock.send(data[: self._budget])
        self._budget -= sent
        return sent


def dying_after(budget: int, party: Transfer) -> Serve:
    async def serve(sock: trio.socket.SocketType) -> None:
        await party.serve(cast(trio.socket.SocketType, _Dying(sock, budget)))

    return serve


def pattern(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK, 10 * BLOCK + 7])
def test_transfer_of_whole_state(size: int) -> None:
    donor = transfer_of(state(pattern(size), b"", pattern(3, 1)))
    receiver = transfer_of(state(bytes(size), b"", bytes(3)))
    assert fetch(receiver, plan_for(donor), [donor.serve]) == []
    assert contents(receiver) == contents(donor)
    assert receiver.rx_bytes == donor.tx_bytes == size + 3


@given(st.binary(min_size=1, max_size=12 * BLOCK), st.data())
def test_only_differing_blocks_are_sent(content: bytes, data: st.DataObject) -> None:
    edits = data.draw(st.sets(st.integers(0, len(content) - 1), max_size=6))
    edited = bytearray(content)
    for at in edits:
        edited[at] ^= 1
    donor, receiver = transfer_of(state(content)), transfer_of(state(bytes(edited)))
    assert fetch(receiver, plan_for(donor), [donor.serve]) == []
    assert contents(receiver) == [content]
    blocks = {at // BLOCK for at in edits}
    expected = sum(len(content[block * BLOCK : (block + 1) * BLOCK]) for block in blocks)
    assert receiver.rx_bytes == donor.tx_bytes == expected


def test_blocks_of_dead_donor_are_kept() -> None:
    donor = transfer_of(state(pattern(20 * BLOCK)))
    dying = transfer_of(state(pattern(20 * BLOCK)))
    receiver = transfer_of(state(bytes(20 * BLOCK)))

    suspects = fetch(receiver, plan_for(donor), [dying_after(20 * BLOCK, dying), donor.serve])
    assert [peer for peer, _ in suspects] == [1]
    assert contents(receiver) == contents(donor)
    assert 0 < donor.tx_bytes < 20 * BLOCK
    assert donor.tx_bytes + dying.tx_bytes <= 21 * BLOCK, "at most the block it died in was sent twice"


def test_wrong_donor_is_rejected_before_overwrite() -> None:
    donor = transfer_of(state(pattern(500)))
    liar = transfer_of(state(pattern(500, seed=9)))
    receiver = transfer_of(state(bytes(500)))
    with pytest.raises(TransferError, match="do not match the elected state"):
        fetch(receiver, plan_for(donor), [liar.serve])
    assert receiver.overwritten == set()
    assert contents(receiver) == [bytes(500)]
    assert fetch(receiver, plan_for(donor), [liar.serve, donor.serve])[0][0] == 1
    assert contents(receiver) == contents(donor)


def test_wrong_block_is_fetched_again() -> None:
    good = pattern(6 * BLOCK)
    donor = transfer_of(state(good))
    spoiled = bytearray(good)
    for block in range(6):
        spoiled[block * BLOCK + 7] ^= 255
    # Its digests are right, its bytes are not.
    liar = Transfer(state(bytes(spoiled)), donor.own)
    receiver = transfer_of(state(bytes(6 * BLOCK)))
    suspects = fetch(receiver, plan_for(donor), [liar.serve, donor.serve])
    assert suspects[0][0] == 1
    assert "of tensor 't0' does not match its digest" in suspects[0][1]
    assert contents(receiver) == [good]


@given(st.data())
def test_any_donor_behaviour_gives_right_content_or_error(data: st.DataObject) -> None:
    """Donors die after any number of bytes; some send wrong blocks, some have other contents altogether."""
    sizes = data.draw(st.lists(st.integers(0, 4 * BLOCK), min_size=1, max_size=3))
    good = [pattern(size, seed) for seed, size in enumerate(sizes)]
    own = [
        bytes(byte ^ 1 if i // BLOCK in changed else byte for i, byte in enumerate(content))
        for content in good
        for changed in [data.draw(st.sets(st.integers(0, 3)))]
    ]
    truth = transfer_of(state(*good))

    def donor(kind: str, budget: int) -> Serve:
        if kind == "other":
            party = transfer_of(state(*[bytes(size) for size in sizes]))
        elif kind == "wrong":
            party = Transfer(state(*[bytes(size) for size in sizes]), truth.own)
        else:
            party = transfer_of(state(*good))

        return dying_after(budget, party)

    kinds = st.tuples(st.sampled_from(["good", "good", "wrong", "other"]), st.integers(0, 6 * BLOCK) | st.just(2**30))
    drawn = data.draw(st.lists(kinds, max_size=4))
    receiver = transfer_of(state(*own))
    failed: list[tuple[int, str]] | None = None
    try:
        fetch(receiver, plan_for(truth), [donor(*each) for each in drawn])
    except TransferError as error:
        failed = error.suspects
    if failed is None:
        assert contents(receiver) == good
    else:
        assert sorted(peer for peer, _ in failed) == list(range(1, len(drawn) + 1)), "all were asked"
        for tensor, before in zip(receiver.tensors, own, strict=True):
            assert bytes(tensor.data) == before or tensor.name in receiver.overwritten


async def silent(sock: trio.socket.SocketType) -> None:
    await trio.sleep_forever()


def test_silent_donor_does_not_delay_others() -> None:
    donor = transfer_of(state(pattern(500)))
    receiver = transfer_of(state(bytes(500)))
    assert fetch(receiver, plan_for(donor), [silent, donor.serve]) == []
    assert contents(receiver) == contents(donor)


def test_digests_are_sent_without_request() -> None:
    donor = transfer_of(state(pattern(500), pattern(90, 1), pattern(7, 2), loose=[1]))

    async def body() -> None:
        ours, theirs = trio.socket.socketpair()
        with ours, theirs, trio.fail_after(BOUND_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(donor.serve, theirs, True)
                for index in (0, 2):
                    sent: m.Digests = await receive_message(ours, m.Digests)
                    assert (sent.tensor, sent.digests) == (index, donor.own.blocks[index])
                nursery.cancel_scope.cancel()

    trio.run(body)


@pytest.mark.usefixtures("many_digests")
def test_silent_donor_fails() -> None:
    donor = transfer_of(state(pattern(500)))
    receiver = transfer_of(state(bytes(500)))
    clock = trio.testing.MockClock(autojump_threshold=0.05)
    suspects = fetch(receiver, plan_for(donor), [silent, donor.serve], clock, bound_s=10 * STALL_S)
    assert suspects == [(1, "was silent for 5 s")]
    assert contents(receiver) == contents(donor)


def test_overwritten_tensors_without_donor() -> None:
    good = pattern(6 * BLOCK)
    donor = transfer_of(state(good, pattern(10)))
    liar = Transfer(state(bytes(6 * BLOCK), pattern(10)), donor.own)
    receiver = transfer_of(state(b"\1" * 6 * BLOCK, pattern(10)))
    with pytest.raises(TransferError, match="t0") as caught:
        fetch(receiver, plan_for(donor), [liar.serve, None])
    assert receiver.overwritten == {"t0"}
    assert sorted(peer for peer, _ in caught.value.suspects) == [1, 2]


def test_loose_tensor_from_one_donor() -> None:
    common = pattern(200)
    spoiled = b"A" * 2 * BLOCK + b"?" * 3 * BLOCK
    first = Transfer(state(common, spoiled, loose=[1]), transfer_of(state(common, b"A" * 5 * BLOCK, loose=[1])).own)
    second = transfer_of(state(common, b"B" * 5 * BLOCK, loose=[1]))
    receiver = transfer_of(state(bytes(200), b"B" * 5 * BLOCK, loose=[1]))
    assert first.own.root == second.own.root
    suspects = fetch(receiver, plan_for(first, loose=True), [first.serve, second.serve])
    assert suspects == [(1, "block 2 of tensor 't1' does not match its digest")]
    assert contents(receiver) == [common, b"B" * 5 * BLOCK], "what came of the first was replaced"


@pytest.mark.parametrize(
    "request_",
    [
        m.DigestRequest(5),
        m.DigestRequest(-1),
        m.BlockRequest(0, 0, 3),
        m.BlockRequest(0, 2, 1),
        m.BlockRequest(0, -1, 1),
        m.BlockRequest(0, 0, 0),
    ],
)
def test_donor_rejects_invalid_requests(request_: m.StateRequest) -> None:
    async def body() -> None:
        donor = transfer_of(state(pattern(2 * BLOCK)))
        ours, theirs = trio.socket.socketpair()
        with ours, theirs, trio.fail_after(BOUND_S):
            await send_message(ours, request_)
            with pytest.raises(ProtocolError):
                await donor.serve(theirs)

    trio.run(body)


def test_root_digest_covers_names_dtypes_shapes() -> None:
    content = memoryview(bytearray(12))
    one = StateTensor("a", "UINT8", (12,), False, content)
    others = [
        StateTensor("b", "UINT8", (12,), False, content),
        StateTensor("a", "INT8", (12,), False, content),
        StateTensor("a", "UINT8", (3, 4), False, content),
        StateTensor("a", "UINT8", (12,), True, content),
    ]
    roots = {fingerprint([tensor]).root for tensor in (one, *others)}
    assert len(roots) == 5


# Many donors at once.


def test_all_donors_serve_distinct_blocks() -> None:
    content = pattern(400 * BLOCK)
    donors = [transfer_of(state(content)) for _ in range(4)]
    receiver = transfer_of(state(bytes(400 * BLOCK)))
    assert fetch(receiver, plan_for(donors[0]), [donor.serve for donor in donors]) == []
    assert contents(receiver) == [content]
    assert all(donor.tx_bytes for donor in donors)
    assert sum(donor.tx_bytes for donor in donors) == receiver.rx_bytes == 400 * BLOCK


class _Slow:
    """A socket of somebody who needs so long for each send."""

    def __init__(self, sock: trio.socket.SocketType, send_s: float, free: int = 1) -> None:
        self._sock = sock
        self._send_s = send_s
        self._free = free

    async def recv_into(self, view: memoryview) -> int:
        return await self._sock.recv_into(view)

    async def send(self, data: memoryview) -> int:
        self._free -= 1
        if self._free < 0:
            await trio.sleep(self._send_s)
        return await self._sock.send(data)


def slow(send_s: float, party: Transfer, free: int = 1) -> Serve:
    """Make sends slow, but the first ones (the digests come first)."""

    async def serve(sock: trio.socket.SocketType) -> None:
        await party.serve(cast(trio.socket.SocketType, _Slow(sock, send_s, free)))

    return serve


def virtual() -> trio.testing.MockClock:
    return trio.testing.MockClock(autojump_threshold=0.02)


def test_slow_donor_does_not_delay_end() -> None:
    donor, snail = (transfer_of(state(pattern(40 * BLOCK))) for _ in range(2))
    receiver = transfer_of(state(bytes(40 * BLOCK)))
    # One block of the snail takes as long as twice the bound.
    serve = [slow(2 * VIRTUAL_BOUND_S, snail), slow(0.01, donor)]
    assert fetch(receiver, plan_for(donor), serve, virtual()) == []
    assert contents(receiver) == contents(donor)


def test_stalled_donor_is_named() -> None:
    donor, stalled = (transfer_of(state(pattern(40 * BLOCK))) for _ in range(2))
    receiver = transfer_of(state(bytes(40 * BLOCK)))
    serve = [slow(float("inf"), stalled, free=5), slow(0.2, donor)]
    assert fetch(receiver, plan_for(donor), serve, virtual(), bound_s=60) == [(1, "was silent for 5 s")]
    assert contents(receiver) == contents(donor)


def test_lost_donor_is_not_waited_for() -> None:
    donor = transfer_of(state(pattern(5 * BLOCK)))
    receiver = transfer_of(state(bytes(5 * BLOCK)))

    async def frozen(sock: trio.socket.SocketType) -> None:
        await trio.sleep(1)
        receiver.lost(1, "no heartbeat")
        await trio.sleep_forever()

    with pytest.raises(TransferError) as caught:
        fetch(receiver, plan_for(donor), [frozen], virtual(), bound_s=PATIENCE_S / 2)
    assert caught.value.suspects == [(1, "was lost: no heartbeat")]


async def asked_for(sock: trio.socket.SocketType, donor: Transfer) -> m.BlockRequest:
    """Tell the donor's digests until a block is asked for, and return that."""
    while True:
        request: m.DigestRequest | m.BlockRequest = await receive_message(sock, m.StateRequest)
        if isinstance(request, m.BlockRequest):
            return request
        await send_message(sock, m.Digests(request.tensor, BLOCK, donor.own.blocks[request.tensor]))


def test_second_copy_of_block_is_verified() -> None:
    """One donor stops within its first block, and what the other sends in its place is wrong."""
    donor = transfer_of(state(pattern(10 * BLOCK)))
    receiver = transfer_of(state(bytes(10 * BLOCK)))
    held: list[int] = []

    async def stuck(sock: trio.socket.SocketType) -> None:
        request = await asked_for(sock, donor)
        held.append(request.first)
        await sock.send(donor.tensors[0].block(request.first)[: BLOCK // 2])
        await trio.sleep_forever()

    async def liar(sock: trio.socket.SocketType) -> None:
        while True:
            number = (await asked_for(sock, donor)).first
            content = bytes(donor.tensors[0].block(number))
            await sock.send(bytes(BLOCK) if number in held else content)

    with pytest.raises(TransferError) as caught:
        fetch(receiver, plan_for(donor), [stuck, liar], virtual())
    told = dict(caught.value.suspects)
    assert told[2] == f"block {held[0]} of tensor 't0' does not match its digest"
    assert "was silent" in told[1]


def test_wrong_bytes_fail_only_their_donor() -> None:
    content = pattern(100 * BLOCK)
    good = [transfer_of(state(content)) for _ in range(2)]
    liar = Transfer(state(bytes(100 * BLOCK)), good[0].own)
    receiver = transfer_of(state(b"\1" * 100 * BLOCK))
    suspects = fetch(receiver, plan_for(good[0]), [good[0].serve, liar.serve, good[1].serve])
    assert [peer for peer, _ in suspects] == [2]
    assert contents(receiver) == [content]
    assert receiver.rx_bytes == 100 * BLOCK, "what was wrong does not count"


def test_retry_fetches_only_missing_blocks() -> None:
    content = pattern(50 * BLOCK)
    donor = transfer_of(state(content))
    first = transfer_of(state(bytes(50 * BLOCK)))
    with pytest.raises(TransferError):
        fetch(first, plan_for(donor), [dying_after(30 * BLOCK, transfer_of(state(content)))])
    assert 0 < first.rx_bytes < 50 * BLOCK
    second = transfer_of(list(first.tensors))
    assert fetch(second, plan_for(donor), [donor.serve]) == []
    assert contents(second) == [content]
    assert second.rx_bytes == 50 * BLOCK - first.rx_bytes


def test_several_receivers() -> None:
    content = pattern(50 * BLOCK)
    donors = [transfer_of(state(content)) for _ in range(2)]
    receivers = [transfer_of(state(bytes(50 * BLOCK))) for _ in range(3)]

    async def body() -> None:
        async def connect(wanted: m.PeerInfo, tells: bool) -> trio.socket.SocketType:
            ours, theirs = trio.socket.socketpair()
            serving.start_soon(serve, donors[wanted.peer - 1], theirs, tells)
            return ours

        async def serve(donor: Transfer, sock: trio.socket.SocketType, tells: bool) -> None:
            with sock, contextlib.suppress(ConnectionLost):
                await donor.serve(sock, tells)

        with trio.fail_after(BOUND_S):
            async with trio.open_nursery() as serving:
                async with trio.open_nursery() as fetching:
                    for receiver in receivers:
                        fetching.start_soon(receiver.fetch, plan_for(donors[0]), [member(1), member(2)], connect)
                serving.cancel_scope.cancel()

    trio.run(body)
    assert all(contents(receiver) == [content] for receiver in receivers)
    assert sum(donor.tx_bytes for donor in donors) == 3 * 50 * BLOCK


def test_long_transfer_opens_more_streams() -> None:
    donor = transfer_of(state(pattern(60 * BLOCK)))
    receiver = transfer_of(state(bytes(60 * BLOCK)))
    streams: list[trio.socket.SocketType] = []

    async def serve(sock: trio.socket.SocketType) -> None:
        streams.append(sock)
        await slow(0.5, donor)(sock)

    assert fetch(receiver, plan_for(donor), [serve], virtual(), bound_s=60) == []
    assert len(streams) == CONNECTIONS
    assert contents(receiver) == contents(donor)
