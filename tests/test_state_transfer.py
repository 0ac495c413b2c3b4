"""State transfers between two or more parties joined by sockets."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.runtime import state_transfer
from pccl.runtime.links import LinkError
from pccl.runtime.state_transfer import StateTensor, Transfer, TransferError, fingerprint
from pccl.runtime.wire import ConnectionLost

BLOCK = 64
BOUND_S = 20

Serve = Callable[[trio.socket.SocketType], Awaitable[None]]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_transfer, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(state_transfer, "BLOCKS_PER_REQUEST", 3)
    monkeypatch.setattr(state_transfer.block_digests, "__defaults__", (BLOCK,))


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


def member(number: int) -> m.Member:
    return m.Member(number, 0, ["10.0.0.1"], 1, 1)


def fetch(receiver: Transfer, plan: m.SyncPlan, donors: Sequence[Serve | None]) -> list[tuple[int, str]]:
    """Runs a fetch from donors numbered 1, 2, ...; None cannot be reached."""

    async def body() -> list[tuple[int, str]]:
        async def serve(donor: Serve, sock: trio.socket.SocketType) -> None:
            with sock:
                try:
                    await donor(sock)
                except (ConnectionLost, ProtocolError, OSError):
                    return

        async def connect(wanted: m.Member) -> trio.socket.SocketType:
            donor = donors[wanted.peer - 1]
            if donor is None:
                raise LinkError("connection refused")
            ours, theirs = trio.socket.socketpair()
            nursery.start_soon(serve, donor, theirs)
            return ours

        suspects: list[tuple[int, str]] = []
        failure: TransferError | None = None
        with trio.fail_after(BOUND_S):
            async with trio.open_nursery() as nursery:
                try:
                    suspects = await receiver.fetch(plan, [member(i + 1) for i in range(len(donors))], connect)
                except TransferError as error:
                    failure = error
                nursery.cancel_scope.cancel()
        if failure is not None:
            raise failure
        return suspects

    return trio.run(body)


def pattern(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 10 * BLOCK, 10 * BLOCK + 7])
def test_everything_is_moved_to_a_receiver_with_nothing(size: int) -> None:
    donor = transfer_of(state(pattern(size), b"", pattern(3, 1)))
    receiver = transfer_of(state(bytes(size), b"", bytes(3)))
    assert fetch(receiver, plan_for(donor), [donor.serve]) == []
    assert contents(receiver) == contents(donor)
    assert receiver.rx_bytes == donor.tx_bytes == size + 3


@given(st.binary(min_size=1, max_size=12 * BLOCK), st.data())
def test_only_blocks_that_differ_travel(content: bytes, data: st.DataObject) -> None:
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


def test_an_unreachable_donor_is_named_and_the_next_one_serves() -> None:
    donor = transfer_of(state(pattern(500)))
    receiver = transfer_of(state(bytes(500)))
    assert fetch(receiver, plan_for(donor), [None, donor.serve]) == [(1, "connection refused")]
    assert contents(receiver) == contents(donor)


def test_a_donor_that_dies_midway_costs_only_what_it_had_not_sent() -> None:
    donor = transfer_of(state(pattern(20 * BLOCK)))
    dying = transfer_of(state(pattern(20 * BLOCK)))
    receiver = transfer_of(state(bytes(20 * BLOCK)))

    async def die_after_a_while(sock: trio.socket.SocketType) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dying.serve, sock)
            while receiver.rx_bytes < 5 * BLOCK:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    suspects = fetch(receiver, plan_for(donor), [die_after_a_while, donor.serve])
    assert [peer for peer, _ in suspects] == [1]
    assert contents(receiver) == contents(donor)
    assert donor.tx_bytes <= 15 * BLOCK


def test_a_donor_with_other_contents_is_found_before_anything_is_overwritten() -> None:
    donor = transfer_of(state(pattern(500)))
    liar = transfer_of(state(pattern(500, seed=9)))
    receiver = transfer_of(state(bytes(500)))
    with pytest.raises(TransferError, match="do not hash to what the group elected"):
        fetch(receiver, plan_for(donor), [liar.serve])
    assert receiver.overwritten == set()
    assert contents(receiver) == [bytes(500)]
    assert fetch(receiver, plan_for(donor), [liar.serve, donor.serve])[0][0] == 1
    assert contents(receiver) == contents(donor)


def test_a_wrong_block_is_found_as_it_lands_and_fetched_from_the_next_donor() -> None:
    good = pattern(6 * BLOCK)
    donor = transfer_of(state(good))
    spoiled = bytearray(good)
    spoiled[3 * BLOCK] ^= 255
    # Its digests are right, its bytes are not.
    liar = Transfer(state(bytes(spoiled)), donor.own)
    receiver = transfer_of(state(bytes(6 * BLOCK)))
    suspects = fetch(receiver, plan_for(donor), [liar.serve, donor.serve])
    assert suspects[0][0] == 1
    assert "block 3" in suspects[0][1]
    assert contents(receiver) == [good]


def test_with_no_donor_left_the_overwritten_tensors_are_named() -> None:
    good = pattern(6 * BLOCK)
    donor = transfer_of(state(good, pattern(10)))
    liar = Transfer(state(bytes(6 * BLOCK), pattern(10)), donor.own)
    receiver = transfer_of(state(b"\1" * 6 * BLOCK, pattern(10)))
    with pytest.raises(TransferError, match="t0") as caught:
        fetch(receiver, plan_for(donor), [liar.serve, None])
    assert receiver.overwritten == {"t0"}
    assert [peer for peer, _ in caught.value.suspects] == [1, 2]


def test_without_any_donor() -> None:
    receiver = transfer_of(state(pattern(5)))
    with pytest.raises(TransferError, match="no donor is left"):
        fetch(receiver, plan_for(transfer_of(state(pattern(5, 1)))), [])


def test_a_loose_tensor_comes_from_one_donor_as_a_whole() -> None:
    common = pattern(200)
    first = transfer_of(state(common, b"A" * 5 * BLOCK, loose=[1]))
    second = transfer_of(state(common, b"B" * 5 * BLOCK, loose=[1]))
    receiver = transfer_of(state(bytes(200), b"B" * 5 * BLOCK, loose=[1]))
    assert first.own.root == second.own.root

    async def die_in_the_loose_tensor(sock: trio.socket.SocketType) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(first.serve, sock)
            while receiver.rx_bytes < 200 + 2 * BLOCK:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    fetch(receiver, plan_for(first, loose=True), [die_in_the_loose_tensor, second.serve])
    assert contents(receiver) == [common, b"B" * 5 * BLOCK]


def test_a_loose_tensor_is_left_alone_unless_the_plan_says_so() -> None:
    donor = transfer_of(state(pattern(100), b"A" * 100, loose=[1]))
    receiver = transfer_of(state(bytes(100), b"B" * 100, loose=[1]))
    fetch(receiver, plan_for(donor), [donor.serve])
    assert contents(receiver) == [pattern(100), b"B" * 100]


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
def test_a_donor_refuses_what_it_does_not_have(request_: m.StateRequest) -> None:
    async def body() -> None:
        donor = transfer_of(state(pattern(2 * BLOCK)))
        ours, theirs = trio.socket.socketpair()
        with ours, theirs, trio.fail_after(BOUND_S):
            await state_transfer.send_message(ours, request_)
            with pytest.raises(ProtocolError):
                await donor.serve(theirs)

    trio.run(body)


def test_the_root_tells_names_dtypes_and_shapes_apart() -> None:
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
