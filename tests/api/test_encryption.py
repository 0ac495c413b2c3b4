"""Traffic between peers under `encrypt=True`: the same results, unreadable and protected against changes."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress

import numpy as np
import pytest
from numpy.typing import NDArray

from pccl import (
    Communicator,
    MasterNode,
    PCCLError,
    QuantizationAlgorithm,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceOp,
    Result,
    SharedState,
)
from pccl.protocol import messages as m
from pccl.runtime.network import handshake
from pccl.runtime.network.handshake import UNREADABLE
from tests.support.cluster import Background, Cluster

TOKEN = "a token of these tests"
PATTERN = b"\x5a\xa5\x3c\xc3pccl!"
"""The bytes that buffers are full of, and the wire must not be."""


@pytest.fixture
def node() -> Iterator[MasterNode]:
    with MasterNode("127.0.0.1:0", token=TOKEN) as node:
        yield node


class Spy:
    """A proxy at a peer's address that records, and can change, the bytes it forwards."""

    def __init__(self) -> None:
        self.target = 0
        """The port to pass connections on to."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.seen: list[bytearray] = []
        """The bytes that went by, for each connection and direction."""
        self.damage: Callable[[bytearray], None] | None = None
        """Changes bytes of connections made from now on, once their handshakes are over."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                near = self._listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=self._pass, args=(near,), daemon=True).start()

    def _pass(self, near: socket.socket) -> None:
        with near, suppress(ConnectionRefusedError):  # the run may be over before the first connection is passed on
            self._pass_on(near)

    def _pass_on(self, near: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self.target)) as far:
            logs = {near: bytearray(), far: bytearray()}
            self.seen += logs.values()
            while True:
                for source in select.select([near, far], [], [])[0]:
                    try:
                        some = bytearray(source.recv(1 << 16))
                        if not some:
                            return
                        logs[source] += some
                        if self.damage is not None and len(logs[source]) > m.PADDING_BYTES_MAX + 1000:
                            self.damage(some)
                        (far if source is near else near).sendall(some)
                    except OSError:
                        return

    @property
    def saw_the_pattern(self) -> bool:
        return any(PATTERN in log for log in self.seen)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def spy() -> Iterator[Spy]:
    spy = Spy()
    yield spy
    spy.close()


def patterned(count: int) -> NDArray[np.uint8]:
    """Reduced with the maximum, it stays what it is."""
    return np.frombuffer(PATTERN * count, np.uint8).copy()


def join_through(cluster: Cluster, spy: Spy, port: int, encrypt: bool) -> None:
    """Join two peers. The first listens on `port`, and links to it pass through the spy."""
    spy.target = port
    cluster.join(1, listen=f"127.0.0.1:{spy.target}", advertise=f"127.0.0.1:{spy.port}", encrypt=encrypt)
    cluster.join(1, encrypt=encrypt)


def state_of(values: NDArray[np.uint8], revision: int) -> SharedState:
    state = SharedState.from_numpy({"model": values})
    state.revision = revision
    return state


@pytest.mark.parametrize(("algorithm", "quantized"), [(ReduceAlgorithm.RING, False), (ReduceAlgorithm.DIRECT, True)])
def test_encrypted_results_are_the_same(node: MasterNode, algorithm: ReduceAlgorithm, quantized: bool) -> None:
    rng = np.random.default_rng(7)
    inputs = [rng.standard_normal(300_001, dtype=np.float32) for _ in range(3)]
    options = QuantizationOptions(algorithm=QuantizationAlgorithm.MIN_MAX) if quantized else None
    results = []
    for encrypt in (False, True):
        cluster = Cluster(node.address, token=TOKEN, encrypt=encrypt)
        cluster.join(3)
        values = [array.copy() for array in inputs]
        cluster.each(
            lambda peer, i, values=values: peer.all_reduce(
                values[i], op=ReduceOp.SUM, algorithm=algorithm, quantization_options=options
            )
        )
        results.append(values[0])
        assert all((value == values[0]).all() for value in values)
        cluster.close_all()
    # Ranks may be dealt otherwise, so that sums are folded in another order.
    assert np.allclose(results[0], results[1], atol=0.1 if quantized else 1e-5)


@pytest.mark.parametrize("encrypt", [False, True])
def test_encryption_hides_payload(
    node: MasterNode, spy: Spy, new_port: Callable[[], int], encrypt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without encryption the same spy sees it all, unless it travels in shared memory."""
    monkeypatch.setenv("PCCL_SHM", "0")
    cluster = Cluster(node.address, token=TOKEN)
    join_through(cluster, spy, new_port(), encrypt)
    values = [patterned(20_000) for _ in range(2)]
    cluster.each(lambda peer, i: peer.all_reduce(values[i], op=ReduceOp.MAX))
    assert bytes(values[0]) == PATTERN * 20_000
    assert sum(map(len, spy.seen)) > 100_000
    assert spy.saw_the_pattern is not encrypt
    del spy.seen[:]
    weights = [patterned(300_000), np.zeros(300_000 * len(PATTERN), np.uint8)]
    cluster.each(lambda peer, i: peer.sync_shared_state(state_of(weights[i], 5 - i)))
    assert bytes(weights[1]) == PATTERN * 300_000
    assert sum(map(len, spy.seen)) > 2_000_000
    assert spy.saw_the_pattern is not encrypt
    cluster.close_all()


def test_encryption_detects_changed_bytes(node: MasterNode, spy: Spy, new_port: Callable[[], int]) -> None:
    cluster = Cluster(node.address, token=TOKEN)
    join_through(cluster, spy, new_port(), encrypt=True)

    def damage(some: bytearray) -> None:
        some[-1] ^= 1

    spy.damage = damage
    weights = [patterned(300_000), np.zeros(300_000 * len(PATTERN), np.uint8)]
    failures = cluster.outcomes(lambda peer, i: peer.sync_shared_state(state_of(weights[i], 5 - i)))
    assert isinstance(failures[1], PCCLError)
    assert UNREADABLE in failures[1].message
    cluster.close_all()


@pytest.mark.parametrize("newcomer", [False, True])
def test_mixed_encryption_is_refused(node: MasterNode, newcomer: bool) -> None:
    cluster = Cluster(node.address, token=TOKEN)
    cluster.join(1, encrypt=not newcomer)
    connecting = Background(cluster.new(encrypt=newcomer).connect)
    while not connecting.is_over:
        cluster[0].update_topology()
    failure = connecting.outcome()
    assert isinstance(failure, PCCLError)
    text = failure.message
    names = (2, 1) if newcomer else (1, 2)
    reason = f"peer {names[0]} encrypts the data between peers but peer {names[1]} does not"
    assert f"evicted: peers 1 and 2 cannot connect to each other: {reason}" in text
    assert "PCCL_ENCRYPT" in text
    cluster.close_all()


def refused(**arguments: object) -> str:
    with pytest.raises(PCCLError) as caught:
        Communicator("127.0.0.1", **arguments)  # type: ignore[arg-type]
    assert caught.value.result is Result.INVALID_ARGUMENT
    return caught.value.message


def test_encryption_needs_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PCCL_TOKEN", raising=False)
    assert "encrypt=True needs a token" in refused(encrypt=True)
    monkeypatch.setenv("PCCL_ENCRYPT", "1")
    assert "PCCL_ENCRYPT=1 needs a token" in refused()
    Communicator("127.0.0.1", encrypt=False)
    Communicator("127.0.0.1", token=TOKEN)
    monkeypatch.setenv("PCCL_ENCRYPT", "yes")
    assert "neither 0 nor 1" in refused(token=TOKEN)
    assert "not str" in refused(token=TOKEN, encrypt="1")


def test_missing_libcrypto_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "why_unavailable", lambda: "libcrypto.so.3: not found")
    assert refused(token=TOKEN, encrypt=True) == "encrypt=True: libcrypto.so.3: not found"
    Communicator("127.0.0.1", token=TOKEN, encrypt=False)


def test_encryption_of_later_links(node: MasterNode) -> None:
    """Links made later are encrypted like the first ones."""
    cluster = Cluster(node.address, token=TOKEN, encrypt=True)
    cluster.join(3)
    cluster.close(cluster[0])
    cluster.join(1)
    values = [np.ones(1000, np.float32) for _ in range(3)]
    cluster.each(lambda peer, i: peer.all_reduce(values[i], op=ReduceOp.SUM))
    assert all((value == 3).all() for value in values)
    cluster.close_all()


# What becomes of a recording when the token becomes known.


def test_encryption_without_x25519_is_refused(node: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshake, "Exchange", nullcontext)
    cluster = Cluster(node.address, token=TOKEN, encrypt=True)
    cluster.join(1)
    connecting = Background(cluster.new().connect)
    while not connecting.is_over:
        cluster[0].update_topology()
    failure = connecting.outcome()
    assert isinstance(failure, PCCLError)
    assert "encryption is requested without a public key" in failure.message
    cluster.close_all()
