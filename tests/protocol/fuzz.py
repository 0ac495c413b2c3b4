"""Damaged and forged input by the million.

    python -m tests.protocol.fuzz --messages 1000000 --frames 1000000 --seed 1

Messages are drawn near to real ones, changed in structure or in bytes, and fed through the real codec

    to a master that has an honest run: no connection but the speaker's hears a word, nobody loses membership, and
        nothing is left of the speaker once it is gone
    to a peer in the middle of an op and a group call: both get their ends
    to both sides of a handshake: nobody gets in

Nothing but ProtocolError may come out, and no memory may stay in use. Frames go to the engine, see
native/tests/fuzz_frame.c, built with gcc under ASan and UBSan. Everything follows from the seed.
"""

from __future__ import annotations

import argparse
import gc
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import msgspec

from pccl.protocol import messages as m
from pccl.protocol.auth import NONCE_BYTES, Acceptor, Dialer
from pccl.protocol.codec import LENGTH_BYTES, OPENING_BYTES_MAX, Decoder, ProtocolError, decode_body, encode
from pccl.protocol.master.machine import Master
from pccl.protocol.master.run_state import Close, Effect, MasterOptions, RunState, Send
from pccl.protocol.messages import Kind, OpRef
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.machine import Peer
from pccl.runtime.network.handshake import Exchange

NATIVE = Path(__file__).resolve().parents[2] / "native"
BLOCKS_GROWTH_MAX = 1000
"""Blocks that the interpreter may have allocated more at the end. What is left of one message in ten is ten times that
in the shortest run."""
PEAK_GROWTH_KIB_MAX = 64 * 1024
"""Of the whole process, which should therefore be the fuzzer's own."""
SETTLED_AFTER = 2000
"""Conversations."""
LONG = 1000
"""Lists of so many elements are not made longer."""
MUTATED_BYTES_MAX = 128 * 1024
"""Longer messages are not sent: decoded, one takes so much more memory that it would be the peak of the process."""
HONEST = (1, 2, 3)
"""Connections and peers of the honest run."""

NUMBERS = (0, 1, 2, 3, 4, 7, 255, -1, 2**16, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**64 - 1, -(2**63))
ODDITIES: tuple[Any, ...] = (
    *NUMBERS,
    *(None, True, False, 0.0, 1.5, float("nan"), float("inf")),
    *("", "x", "x" * 300, "\n\x1b[2J", "\udcff".encode("utf-8", "surrogatepass"), b"", b"\0" * 32),
    *([], [[]], [[[]]], [0] * 300, {}, {"a": 1}, ["Beat"], ["Hello"]),
)

HELLO = m.Hello(m.PROTOCOL_VERSION, "1.0", 0, ["10.0.0.9"], 5000, 2, "name")
OFFER = m.SyncOffer("enforce_popular", 1, b"r" * 32, [m.TensorOffer("w", "float32", [2, 3], False)])
OPS = [OpRef(0, 0), OpRef(7, 1)]
MEMBERS = [m.PeerInfo(peer, 0, ["10.0.0.1"], 5000, 1) for peer in HONEST]
FROM_PEER: tuple[m.Message, ...] = (
    *(HELLO, m.HeartbeatHello(m.PROTOCOL_VERSION, "a guess", 1), m.Leave("bye")),
    *(m.GroupCall(1, kind, OFFER if kind == Kind.SYNC else None, OPS) for kind in Kind.ALL),
    *(m.GroupCallCancel(1), m.LinksReady(2, [(1, "?")], [(2, "?")]), m.LinkLost(1, 2, "reset")),
    *(m.OpsDone(1, OPS), m.OpFailed(1, 0, 0, 3, "?"), m.OpsStalled(1, OPS), m.FlushReply(1, OPS)),
    *(m.SyncReport(1, False, "?", [(2, "?")]), m.Probes(1, [m.LinkMetric(2, False, 1e6, 100)])),
    m.Report([(1, 2, 3)], 4, 5, 6, 7, [m.LinkReport(2, 4)]),
)
FROM_MASTER: tuple[m.Message, ...] = (
    *(m.Welcome(1, "run", 1), m.Goodbye(3, "?"), m.Flush(1, 1), m.Install(2, True)),
    m.Prepare(2, MEMBERS, [m.Ring(0, 2, list(HONEST))], OPS, [(1, 2)], [(4, "?")]),
    *(m.OpsCommit(1, OPS), m.OpAbort(1, 0, 0, 3, "?"), m.GroupCallResult(1, 0, "", 1)),
    *(m.SyncPlan(1, 1, b"r" * 32, [1, 2], True, False), m.Probe(1, [(2, False), (3, True)])),
)
LINK = m.LinkHello(m.PROTOCOL_VERSION, "run", 2, 1, 1, 0, 4)
PEER_TO_PEER: tuple[tuple[Any, m.Message], ...] = (
    (m.PeerOpening, LINK),
    (m.PeerOpening, m.StateHello(m.PROTOCOL_VERSION, "run", 2, 1, 1)),
    (m.PeerOpening, m.ProbeHello(m.PROTOCOL_VERSION, "run", 2, 1, True)),
    (m.PeerAnswer, m.Rejected("?")),
    (m.StateRequest, m.DigestRequest(1)),
    (m.StateRequest, m.BlockRequest(1, 0, 4)),
    (m.StateAnswer, m.Digests(1, 2**20, b"d" * 64)),
)


class Mutator:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0
        """Messages changed so far."""

    def frame(self, message: m.Message) -> bytes:
        """A changed message, framed, mostly with its right length."""
        self.count += 1
        draw = self.random
        plain = msgspec.to_builtins(message, builtin_types=(bytes,))
        is_changed = draw.random() < 0.7
        if is_changed:
            for _ in range(draw.choice((1, 1, 2, 3))):
                plain = self._structure(plain)
        body = bytearray(msgpack.packb(plain))
        if len(body) > MUTATED_BYTES_MAX:
            body, is_changed = bytearray(encode(message)[LENGTH_BYTES:]), False
        if not is_changed or draw.random() < 0.1:
            self._bytes(body)
        length = (
            len(body) if draw.random() < 0.95 else draw.choice((0, 1, len(body) + 1, 2**14, 2**24, 2**31, 2**32 - 1))
        )
        return length.to_bytes(LENGTH_BYTES, "big") + body

    def words(self, message: m.Message) -> bytes:
        """A message that may have been changed: damage counts for more among what is whole."""
        return encode(message) if self.random.random() < 0.4 else self.frame(message)

    def _structure(self, plain: Any) -> Any:
        """Somewhere an odd value, or one more or one less."""
        draw = self.random
        if not isinstance(plain, list | tuple) or not plain or draw.random() < 0.05:
            alike = [oddity for oddity in ODDITIES if type(oddity) is type(plain)]
            return draw.choice(alike if alike and draw.random() < 0.8 else ODDITIES)
        changed = list(plain)
        is_named = isinstance(changed[0], str) and len(changed) > 1  # another name is another message
        at = draw.randrange(1 if is_named and draw.random() < 0.9 else 0, len(changed))
        how = draw.random()
        if how < 0.05:
            del changed[at]
        elif how < 0.1:
            changed.insert(at, draw.choice(ODDITIES))
        elif how < 0.15:
            times = draw.choice((2, 50))
            changed *= times if len(changed) < LONG else 1
        elif isinstance(changed[at], int) and how < 0.6:
            changed[at] = max(-(2**63), min(2**64 - 1, changed[at] + draw.choice((-1, 1))))
        else:
            changed[at] = self._structure(changed[at])
        return changed

    def _bytes(self, body: bytearray) -> None:
        draw = self.random
        for _ in range(draw.choice((1, 1, 2, 5))):
            how, at = draw.random(), draw.randrange(len(body) + 1)
            if how < 0.6 and at < len(body):
                body[at] ^= 1 << draw.randrange(8)
            elif how < 0.7:
                del body[at:]
            elif how < 0.8:
                body[at:at] = draw.randbytes(draw.choice((1, 4, 40)))
            else:
                body[at : at + 1] = bytes([draw.choice((0xC1, 0xDD, 0xDB, 0xDF, 0xC9, 0xFF, 0x80, 0x91))])


def drain(decoder: Decoder[Any], frame: bytes) -> list[Any]:
    """Return the messages that the codec lets through."""
    return list(decoder.feed(frame))


class AgainstMaster:
    """Connections that have proved nothing, and some that wait to be let in, talk to a master that leads a run."""

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator
        self._master = Master(RunState("run", MasterOptions()))
        self._next_connection = 100
        for connection in HONEST:
            self._master.connected(connection, "10.0.0.1", 0.0)
            self._heed(self._master.received(connection, HELLO, 0.0))
            self._master.connected(10 + connection, "10.0.0.1", 0.0)
            heartbeats = m.HeartbeatHello(m.PROTOCOL_VERSION, "run", connection)
            self._heed(self._master.received(10 + connection, heartbeats, 0.0))
            if connection > 1:
                for other in range(1, connection):
                    self._heed(self._master.received(other, m.GroupCall(1, Kind.UPDATE_TOPOLOGY), 0.0))
        assert self._master.state.accepted == list(HONEST)
        self._size = self._state_size()

    def _heed(self, effects: list[Effect]) -> None:
        """Honest peers answer at once."""
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, m.Prepare):
                answer = m.LinksReady(effect.message.view)
                self._heed(self._master.received(effect.connection, answer, 0.0))

    def _state_size(self) -> int:
        return sum(len(value) for value in vars(self._master).values() if isinstance(value, dict | set | list))

    def round(self) -> None:
        draw = self._mutator.random
        connection = self._next_connection
        self._next_connection += 1
        decoder: Decoder[m.FromPeer] = Decoder(m.FromPeer, OPENING_BYTES_MAX)
        is_open = True

        def check(effects: list[Effect]) -> None:
            nonlocal is_open
            for effect in effects:
                assert not isinstance(effect, Send | Close) or effect.connection == connection, effect
                is_open = is_open and not isinstance(effect, Close)

        check(self._master.connected(connection, "10.0.0.9", 0.0))
        if draw.random() < 0.6:
            check(self._master.received(connection, HELLO, 0.0))
        try:
            for _ in range(draw.randint(1, 8)):
                for message in drain(decoder, self._mutator.words(draw.choice(FROM_PEER))):
                    if is_open:
                        check(self._master.received(connection, message, 0.0))
        except ProtocolError:
            pass
        check(self._master.disconnected(connection, "reset", 0.0))
        assert self._master.state.accepted == list(HONEST)
        assert self._state_size() == self._size


class AgainstPeer:
    """A master that has gone mad talks to a peer that waits in an op and in a group call."""

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator

    def round(self) -> None:
        draw = self._mutator.random
        machine = Peer(0, 1)
        ended: set[tuple[str, int]] = set()

        def carry_out() -> None:
            while effects := machine.drain():
                for effect in effects:
                    if isinstance(effect, ps.EndOp):
                        machine.op_ended(effect.op, 1, 1)
                    elif isinstance(effect, ps.FreezeOps):
                        machine.frozen(effect.epoch)
                    elif isinstance(effect, ps.MakeLink):
                        machine.link_connected(effect.link)
                    elif isinstance(effect, ps.OpResult):
                        ended.add(("op", effect.op))
                    elif isinstance(effect, ps.CallResult):
                        ended.add(("call", effect.call))

        for message in (m.Welcome(1, "run", 1), m.Prepare(1, MEMBERS, [m.Ring(0, 1, list(HONEST))]), m.Install(1)):
            machine.received(message)
            carry_out()
        machine.launch(1, 7, 0.0)
        machine.group_call(1, Kind.ARE_PEERS_PENDING)
        decoder: Decoder[m.FromMaster] = Decoder(m.FromMaster)
        try:
            for _ in range(draw.randint(1, 8)):
                for message in drain(decoder, self._mutator.words(draw.choice(FROM_MASTER))):
                    machine.received(message)
                    carry_out()
        except ProtocolError as error:
            machine.master_lost(str(error))
        machine.master_lost("over")
        carry_out()
        assert ended == {("op", 1), ("call", 1)}


class AgainstCodec:
    """Openings and answers that peers exchange before they know each other."""

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator

    def round(self) -> None:
        expected, message = self._mutator.random.choice(PEER_TO_PEER)
        decoder: Decoder[m.Message] = Decoder(expected, OPENING_BYTES_MAX)
        with suppress(ProtocolError):
            assert all(isinstance(found, m.Message) for found in drain(decoder, self._mutator.frame(message)))


class AgainstHandshake:
    """One message of a handshake is changed on the way: one of both sides refuses the other."""

    def __init__(self, mutator: Mutator) -> None:
        self._mutator = mutator

    def round(self) -> None:
        draw = self._mutator.random
        exchanges = [Exchange(draw.randbytes(32)) if draw.random() < 0.8 else None for _ in range(2)]
        opening = msgspec.structs.replace(LINK, encrypt=all(exchanges) and draw.random() < 0.5)
        dialer = Dialer("token", draw.randbytes(NONCE_BYTES), opening, "run", exchanges[0])
        acceptor = Acceptor("token", draw.randbytes(NONCE_BYTES), "run", "peer 1", exchanges[1])
        which = draw.randrange(4)

        def carry(number: int, frame: bytes, expected: Any) -> tuple[Any, bytes]:
            if number == which:
                changed = self._mutator.frame(decode_body(frame[LENGTH_BYTES:], expected))
                if changed != frame:
                    frame = changed
                else:
                    raise ProtocolError("unchanged after all")
            decoder: Decoder[m.Message] = Decoder(expected, OPENING_BYTES_MAX)
            decoder.feed_raw(frame)
            body = decoder.next_body()
            if body is None:
                raise ProtocolError("incomplete")
            return decode_body(body, expected), body

        try:
            said, body = carry(0, dialer.opening, m.PeerOpening)
            frame = acceptor.challenge(said, body)
            assert frame is not None
            challenge, body = carry(1, frame, m.Challenge)
            answer, _ = carry(2, dialer.answer(challenge, body), m.Proof)
            theirs, body = carry(3, acceptor.check(answer), m.Proof)
            dialer.check(theirs)
            dialer.check_answer(m.Accepted())
            assert dialer.payload_keys == (acceptor.payload_keys and acceptor.payload_keys[::-1])
        except ProtocolError:
            return
        # A proof that says something more after what counts is one all the same: later versions may.
        assert which >= 2, "a changed opening or challenge went through"


TARGETS: tuple[tuple[int, Callable[[Mutator], Any]], ...] = (
    (4, AgainstMaster),
    (2, AgainstPeer),
    (2, AgainstCodec),
    (1, AgainstHandshake),
)


def fuzz_messages(count: int, seed: int) -> str:
    """AssertionError, or whatever else should not have come. Returns a line for the report."""
    mutator = Mutator(seed)
    targets = [target for weight, make in TARGETS for target in [make(mutator)] * weight]
    start, rounds, settled_blocks, settled_kib = time.perf_counter(), 0, 0, 0
    try:
        while mutator.count < count or rounds <= SETTLED_AFTER:
            if rounds == SETTLED_AFTER:
                settled_blocks, settled_kib = _allocated_blocks(), _peak_kib()
            mutator.random.choice(targets).round()
            rounds += 1
        left_blocks, grown_kib = _allocated_blocks() - settled_blocks, _peak_kib() - settled_kib
        assert left_blocks < BLOCKS_GROWTH_MAX, f"{left_blocks} blocks of memory more in use than in the beginning"
        assert grown_kib < PEAK_GROWTH_KIB_MAX, f"{grown_kib} KiB more at the peak than in the beginning"
    except BaseException:
        print(f"message {mutator.count}, seed {seed}", file=sys.stderr)
        raise
    taken_s = time.perf_counter() - start
    return (
        f"{mutator.count} mutated messages in {rounds} conversations, {mutator.count / taken_s:.0f} a second; "
        f"{left_blocks} blocks of memory left, the peak grew by {grown_kib / 1024:.0f} MiB"
    )


def _allocated_blocks() -> int:
    gc.collect()
    return sys.getallocatedblocks()


def _peak_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def fuzz_frames(count: int, seed: int) -> None:
    """CalledProcessError."""
    command = ["make", "-s", "-C", str(NATIVE), "fuzz", "SANITIZE=address,undefined", f"FRAMES={count}", f"SEED={seed}"]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    if arguments.messages:
        print(fuzz_messages(arguments.messages, arguments.seed), flush=True)
    if arguments.frames:
        fuzz_frames(arguments.frames, arguments.seed)


if __name__ == "__main__":
    main()
