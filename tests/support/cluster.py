"""Peers of one run inside this process, and simultaneous calls. Every wait is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pytest

from pccl import Attribute, Communicator, MasterNode, PCCLError, ReduceOp, Result
from pccl.runtime.threads import portal
from tests.support import stacks

WAIT_S = 60.0
"""Far more than anything here takes; only a bug or a very busy machine exceeds it."""
POLL_S = 0.002
PEER_TIMEOUT_S = 60.0

SUM = ReduceOp.SUM

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, limit_s: float = WAIT_S) -> T:
    """Wait until `condition` returns a true value, and return it."""
    end_s = time.monotonic() + limit_s
    while not (value := condition()):
        assert time.monotonic() < end_s, f"not within {limit_s:g} s: {what}"
        time.sleep(POLL_S)
    return value


class Background:
    """A call that runs in its own thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:
            self._error = error

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def outcome(self, limit_s: float = WAIT_S) -> Any:
        """Wait for the call, and return its value or the PCCLError that it raised."""
        self._thread.join(limit_s)
        if not self.is_over:
            what = f"the call of {self._thread.name} has not returned within {limit_s:g} s"
            raise AssertionError(f"{what}:\n{stacks.report()}")
        if self._error is not None and not isinstance(self._error, PCCLError):
            raise self._error
        return self._error or self._value

    def result(self, limit_s: float = WAIT_S) -> Any:
        outcome = self.outcome(limit_s)
        if isinstance(outcome, PCCLError):
            raise outcome
        return outcome


def outcomes(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make all calls at the same time, and return the value or PCCLError of each."""
    threads = [Background(call) for call in calls]
    return [thread.outcome() for thread in threads]


def together(calls: Sequence[Callable[[], T]]) -> list[T]:
    """Make all calls at the same time, and return their values."""
    threads = [Background(call) for call in calls]
    for thread in threads:
        thread.outcome()
    return [thread.result() for thread in threads]


def results(found: Sequence[Any]) -> list[Result]:
    """Return the `Result` of each of these `outcomes`."""
    return [value.result if isinstance(value, PCCLError) else Result.SUCCESS for value in found]


def ones(count: int = 8) -> np.ndarray[Any, Any]:
    return np.ones(count, np.float32)


def reduce_once(peer: Communicator, _: int = 0) -> int:
    x = ones()
    world = peer.all_reduce(x, op=SUM).world_size
    assert np.all(x == world)
    return world


def refusal(call: Callable[[], Any]) -> PCCLError:
    with pytest.raises(PCCLError) as caught:
        call()
    return caught.value


def evict(master: MasterNode, communicator: Communicator) -> None:
    """Let the master evict a peer, as after a silence."""
    assert master._service is not None
    server, membership = master._service._server, communicator.membership

    async def act() -> None:
        leader = server._machine.master
        leader._evict(membership.peers[membership.rank], "silent for 5.0 s")
        server._execute(leader._advance())

    portal.current().call(act)
    until(lambda: not communicator.is_connected, "the peer learns of it")


class Cluster:
    """All admitted peers of one run. `each` makes group calls among them."""

    def __init__(self, address: str, **options: Any) -> None:
        self.address = address
        self.options = options
        self.peers: list[Communicator] = []

    def __getitem__(self, index: int) -> Communicator:
        return self.peers[index]

    def new(self, **options: Any) -> Communicator:
        """Return a communicator that is not connected, and not yet one of the peers."""
        return Communicator(self.address, **{**self.options, **options})

    def join(self, count: int = 1, **options: Any) -> list[Communicator]:
        """Admit newcomers one after the other, so that their order is known, and return them."""
        return [self.admit([self.new(**options)])[0] for _ in range(count)]

    def admit(self, newcomers: list[Communicator]) -> list[Communicator]:
        """Connect all newcomers at once, while the others call update_topology until all are admitted."""
        world = len(self.peers) + len(newcomers)

        def gather(peer: Communicator) -> None:
            while peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < world:
                peer.update_topology()

        def connect(peer: Communicator) -> None:
            peer.connect()
            gather(peer)

        threads = [Background(partial(connect, peer)) for peer in newcomers]
        together([partial(gather, peer) for peer in self.peers])
        for thread in threads:
            thread.result()
        self.peers += newcomers
        return newcomers

    def each(self, call: Callable[[Communicator, int], T]) -> list[T]:
        """Run `call(peer, index)` for all peers at the same time."""
        return together([partial(call, peer, i) for i, peer in enumerate(self.peers)])

    def outcomes(self, call: Callable[[Communicator, int], T]) -> list[Any]:
        """Do as `each`, but return the value or PCCLError of each call."""
        return outcomes([partial(call, peer, i) for i, peer in enumerate(self.peers)])

    def close(self, peer: Communicator) -> None:
        """Close a peer, and return once the others have noticed. They must not be in a call."""
        self.peers.remove(peer)
        peer.close()
        world = len(self.peers)
        for other in self.peers:
            until(partial(_sees, other, world), f"{world} peers are left")

    def close_all(self) -> None:
        together([peer.close for peer in self.peers])
        self.peers.clear()


def waits_at_master(peer: Communicator) -> bool:
    """Whether the next update_topology would admit a connecting peer, since the master has its heartbeats."""
    session = peer._inner._session
    return session is not None and session._machine.peer != 0 and session._heartbeats.is_connected


def _sees(peer: Communicator, world: int) -> bool:
    return peer.get_attribute(Attribute.GLOBAL_WORLD_SIZE) == world


@contextmanager
def run_of(world: int, **options: Any) -> Iterator[Cluster]:
    """Run a master and `world` peers, which stay in the run while the machine is busy."""
    with MasterNode("127.0.0.1:0", peer_timeout=PEER_TIMEOUT_S) as master:
        cluster = Cluster(master.address, **options)
        cluster.join(world)
        try:
            yield cluster
        finally:
            cluster.close_all()
