"""Ops that are given up at any moment, by some or all: their arrays are the callers' again when the error comes, as
they were, and nobody touches them after that. Peers never disagree on what they are told."""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import (
    AsyncReduceHandle,
    Communicator,
    MasterNode,
    PCCLError,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    Result,
)
from tests.support.cluster import Background, Cluster, outcomes, refusal, results, until, waits_at_master
from tests.support.fake_device import FakeArray, FakeDevice

WORLD = 3
ROUNDS = 300
COUNTS = (1, 1000, 20_000, 150_000, 600_000)
MARK = -3.5
SUM = ReduceOp.SUM


@dataclass
class Attempt:
    """One peer's part of an op."""

    send: np.ndarray[Any, Any]
    recv: np.ndarray[Any, Any]
    tag: int
    how: str
    timeout_s: float
    quantization: QuantizationOptions | None
    algorithm: ReduceAlgorithm | None
    is_kept: bool = True

    def run(self, peer: Communicator) -> Result:
        before = self.send.tobytes()
        try:
            getattr(self, f"_{self.how}")(peer)
            return Result.SUCCESS
        except PCCLError as error:
            self.is_kept = self.send.tobytes() == before
            self.send[:] = self.recv[:] = MARK
            return error.result

    @property
    def is_untouched(self) -> bool:
        return bool((self.send == MARK).all() and (self.recv == MARK).all())

    def _call(self, peer: Communicator) -> None:
        peer.all_reduce(
            self.send,
            self.recv,
            op=SUM,
            tag=self.tag,
            timeout=self.timeout_s,
            quantization_options=self.quantization,
            algorithm=self.algorithm,
        )

    def _launch(self, peer: Communicator) -> Any:
        return peer.all_reduce_async(
            self.send,
            self.recv,
            op=SUM,
            tag=self.tag,
            quantization_options=self.quantization,
            algorithm=self.algorithm,
        )

    def _drop(self, peer: Communicator) -> None:
        self._launch(peer).result(self.timeout_s)

    def _insist(self, peer: Communicator) -> None:
        handle = self._launch(peer)
        for timeout_s in (self.timeout_s, self.timeout_s, None):
            try:
                handle.result(timeout_s)
                return
            except PCCLError as error:
                # It may have come to another end since this wait did.
                if timeout_s is None or error.result is not Result.TIMEOUT:
                    raise

    def _many(self, peer: Communicator) -> None:
        descriptor = ReduceDescriptor(
            self.send.size, SUM, self.tag, quantization_options=self.quantization, algorithm=self.algorithm
        )
        descriptors = [ReduceOpDescriptor.from_numpy(self.send, self.recv, descriptor)]
        peer.all_reduce_multiple_with_retry(descriptors, timeout=self.timeout_s)


def is_settled(peer: Communicator) -> bool:
    return peer.stats["ops_open"] == 0


def attempts(rng: random.Random, tag: int) -> list[Attempt]:
    count = rng.choice(COUNTS)
    quantization = QuantizationOptions() if rng.random() < 0.2 else None
    algorithm = rng.choice((None, ReduceAlgorithm.RING, ReduceAlgorithm.DIRECT))
    found = []
    for index in range(WORLD):
        send = np.full(count, index + 1, np.float32)
        recv = send if rng.random() < 0.6 else np.empty_like(send)
        how = rng.choice(("call", "call", "drop", "insist", "many"))
        timeout_s = rng.choice((0.0, rng.uniform(0, 0.004), 0.2))
        found.append(Attempt(send, recv, tag, how, timeout_s, quantization, algorithm))
    return found


def hammer(cluster: Cluster, seed: int, rounds: int = ROUNDS) -> None:
    rng = random.Random(seed)
    given_up: list[Attempt] = []
    for tag in range(seed * rounds, (seed + 1) * rounds):
        made = attempts(rng, tag)
        found = outcomes([partial(each.run, peer) for each, peer in zip(made, cluster.peers, strict=True)])
        assert all(each.is_kept for each in made), found
        told = [
            result
            for each, result in zip(made, found, strict=True)
            if each.how != "drop" or result is not Result.TIMEOUT  # which says nothing of the op
        ]
        assert set(told) <= {Result.SUCCESS, Result.TIMEOUT, Result.OUTCOME_UNKNOWN}, found
        assert not {Result.SUCCESS, Result.TIMEOUT} <= set(told), found
        for each, result in zip(made, found, strict=True):
            if result is Result.SUCCESS:
                assert np.allclose(each.recv, sum(range(1, WORLD + 1)), atol=0.1)
            else:
                given_up.append(each)
    for peer in cluster.peers:
        until(partial(is_settled, peer), "all have their verdicts")
    assert all(each.is_untouched for each in given_up)
    assert len(given_up) > rounds // 4
    assert (
        cluster.each(lambda peer, _: peer.all_reduce(np.ones(5, np.float32), op=SUM, tag=2**40 + seed).world_size)
        == [WORLD] * WORLD
    )


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "encrypted": {"token": "secret", "encrypt": True},
    "two engine threads": {},
}


@pytest.fixture(params=["plain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "plain")])
def cluster_of_kind(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    options = KINDS[request.param]
    threads = 2 if request.param == "two engine threads" else 1
    with MasterNode("127.0.0.1:0", engine_threads=threads, token=options.get("token")) as master:
        cluster = Cluster(master.address, **options)
        cluster.join(WORLD)
        yield cluster
        cluster.close_all()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_nobody_touches_what_was_given_up(cluster_of_kind: Cluster, seed: int) -> None:
    hammer(cluster_of_kind, seed)


@pytest.fixture
def stopped_master(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster], None]:
    """A function that has the master hear nothing of its peers any more."""

    def stop(cluster: Cluster) -> None:
        for peer in cluster.peers:
            session = peer._inner._session
            assert session is not None
            monkeypatch.setattr(session._master.connection, "send", lambda _: None)

    monkeypatch.setattr("pccl.communicator.CANCEL_GRACE_S", 0.2)
    return stop


def test_an_outcome_that_nobody_tells_is_unknown(cluster: Cluster, stopped_master: Callable[[Cluster], None]) -> None:
    cluster.join(2)
    stopped_master(cluster)
    x = np.ones(8, np.float32)
    found = refusal(partial(cluster[0].all_reduce, x, op=SUM, tag=3, timeout=0.1))
    assert found.result is Result.OUTCOME_UNKNOWN
    assert "the op with tag 3 was given up here" in str(found)
    assert "peers [2]" in str(found)
    assert "sync_shared_state" in str(found)
    again = refusal(partial(cluster[0].all_reduce, x, op=SUM, tag=3, timeout=0.1))
    assert again.result is Result.INVALID_USAGE
    assert "its caller has given it up" in str(again)
    y = np.ones(8, np.float32)
    many = [ReduceOpDescriptor.from_numpy(y, y, ReduceDescriptor(8, SUM, tag)) for tag in (4, 5)]
    failed = refusal(partial(cluster[0].all_reduce_multiple_with_retry, many, timeout=0.1))
    assert failed.result is Result.OUTCOME_UNKNOWN
    assert "tags [4, 5]" in str(failed)
    assert np.all(y == 1)


def test_an_op_that_has_not_begun_is_copied_or_taken_back(cluster: Cluster) -> None:
    """While the ring is changed ops are queued."""
    cluster.join(2)
    newcomer = cluster.new()
    connecting = Background(newcomer.connect)
    until(partial(waits_at_master, newcomer), "it waits")
    admitting = Background(cluster[0].update_topology)  # exclusive: what is launched now waits for it
    until(lambda: is_in_call(cluster[0]), "it is in the call")
    x, parts = np.full(100_000, 2, np.float32), np.ones(4, np.float32)
    handle = cluster[0].all_reduce_async(x, op=SUM, tag=1)
    gathering = cluster[0].launch.all_gather(parts, tag=2)
    assert refusal(partial(handle.wait, 0.01)).result is Result.TIMEOUT
    assert gathering.wait(0.01)[:2] == (False, Result.TIMEOUT)
    assert np.all(x == 2)
    x[:] = MARK
    cluster[1].update_topology()
    admitting.result()
    connecting.result()
    cluster.peers.append(newcomer)
    others = [peer.all_reduce_async(np.full(100_000, 3, np.float32), op=SUM, tag=1) for peer in cluster.peers[1:]]
    until(handle.done, "all have called")
    assert np.all(x == MARK)
    assert handle.wait()[1] is Result.SUCCESS
    assert np.all(x == 8)
    assert [other.wait()[1] for other in others] == [Result.SUCCESS] * 2


def is_in_call(peer: Communicator) -> bool:
    session = peer._inner._session
    return session is not None and session._machine._calls.kind != ""


def test_an_array_on_a_device_is_its_callers_once_it_has_been_copied(
    cluster: Cluster, devices: list[FakeDevice]
) -> None:
    cluster.join(2)
    held = [devices[index].array(np.full(50_000, index + 1, np.float32)) for index in range(2)]
    handle = cluster[0].all_reduce_async(held[0], op=SUM)
    assert refusal(partial(handle.wait, 0.2)).result is Result.TIMEOUT
    held[0].set_later(np.full(50_000, MARK, np.float32))
    cluster[1].all_reduce(held[1], op=SUM)
    np.testing.assert_array_equal(held[0].settled(), np.full(50_000, MARK, np.float32))
    assert handle.wait()[1] is Result.SUCCESS
    np.testing.assert_array_equal(held[0].settled(), np.full(50_000, 3, np.float32))


def test_a_device_that_copies_nothing_does_not_keep_its_caller(
    cluster: Cluster, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl.runtime.session.reclaims.DEVICE_GRACE_S", 0.1)
    cluster.join(2)
    held = [devices[index].array(np.full(50_000, index + 1, np.float32)) for index in range(2)]
    devices[0].reads_held.clear()
    handle = cluster[0].all_reduce_async(held[0], op=SUM)
    other = Background(partial(cluster[1].all_reduce, held[1], op=SUM))
    with suppress(PCCLError):  # TIMEOUT, unless the verdict is there at once
        handle.wait(0.1)
    assert refusal(handle.result).result is Result.INTERNAL_ERROR
    assert "its device has copied nothing" in str(other.outcome())
    devices[0].reads_held.set()


def test_a_peer_that_cannot_take_a_result_leaves(cluster: Cluster, devices: list[FakeDevice]) -> None:
    cluster.join(WORLD)
    held = [devices[index].array(np.full(50_000, index + 1, np.float32)) for index in range(WORLD)]
    devices[0].fails_to_write = True
    failed = cluster.outcomes(lambda peer, i: peer.all_reduce(held[i], op=SUM))
    assert results(failed) == [Result.INTERNAL_ERROR, Result.SUCCESS, Result.SUCCESS]
    assert "this peer has left the run" in str(failed[0])
    until(lambda: cluster[1].world_size == cluster[2].world_size == 2, "the others have heard of it")
    left = refusal(partial(cluster[0].all_reduce, np.ones(3, np.float32), op=SUM))
    assert left.result is Result.INTERNAL_ERROR
    assert "could not be copied to the device" in str(left)


def disturb(monkeypatch: pytest.MonkeyPatch, put_in_place: Any, happens: Callable[[], None], times: int = 1) -> None:
    """Have this happen in the next attempts to put a result into its array, and not in those after them."""
    deliver, left = put_in_place.deliver, times

    def raise_or_deliver() -> None:
        nonlocal left
        if left:
            left -= 1
            happens()
        deliver()

    monkeypatch.setattr(put_in_place, "deliver", raise_or_deliver)


@pytest.fixture
def raise_in_handler() -> Iterator[Callable[[BaseException], None]]:
    """Raises an exception in a signal handler of the program's."""
    errors = deque[BaseException](maxlen=1)

    class Handler:
        def __call__(self, number: int, frame: object) -> None:
            raise errors[0]

    def signalled(error: BaseException) -> None:
        errors.append(error)
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, partial(Handler()))
    yield signalled
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize(("kind", "times"), [(TimeoutError, 1), (TimeoutError, 2), (KeyboardInterrupt, 1)])
def test_who_raises_while_a_result_is_put_in_place_gets_it_with_the_next_wait(
    cluster: Cluster,
    devices: list[FakeDevice],
    monkeypatch: pytest.MonkeyPatch,
    raise_in_handler: Callable[[BaseException], None],
    kind: type[BaseException],
    times: int,
    is_on_device: bool,
) -> None:
    """A signal handler may raise what it likes, anywhere: nothing is wrong with the array, and the peer stays."""
    cluster.join(2)
    ones = np.ones(64, np.float32)
    held = devices[0].array(ones) if is_on_device else ones.copy()
    handle = cluster[0].all_reduce_async(held, op=SUM)
    assert refusal(partial(handle.wait, 0.1)).result is Result.TIMEOUT
    cluster[1].all_reduce(ones.copy(), op=SUM)
    until(handle.done, "it is over")
    put_in_place = handle._op.source if is_on_device else handle._op.copy
    assert put_in_place is not None
    disturb(monkeypatch, put_in_place, lambda: raise_in_handler(kind("of a signal handler")), times)
    with pytest.raises(kind, match="of a signal handler"):
        handle.wait()
    for _ in range(times - 1):
        with nullcontext() if is_on_device else pytest.raises(kind):
            handle.wait()
    assert handle.wait()[1] is Result.SUCCESS
    np.testing.assert_array_equal(held.settled() if isinstance(held, FakeArray) else held, 2 * ones)
    assert cluster[0].world_size == 2


def ended_on_device(cluster: Cluster, devices: list[FakeDevice]) -> tuple[FakeArray, AsyncReduceHandle]:
    """Return the array of the first of two peers, and its op, which is over and has not been waited for."""
    cluster.join(2)
    held = devices[0].array(np.ones(64, np.float32))
    handle = cluster[0].all_reduce_async(held, op=SUM)
    cluster[1].all_reduce(np.ones(64, np.float32), op=SUM)
    until(handle.done, "it is over")
    return held, handle


@pytest.mark.usefixtures("raise_in_handler")
def test_a_device_that_fails_once_has_not_failed(
    cluster: Cluster, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call succeeds: the array has the result."""
    held, handle = ended_on_device(cluster, devices)
    source = handle._op.source
    assert source is not None

    def fail() -> None:
        raise RuntimeError("a transient error of the device")

    disturb(monkeypatch, source, fail)
    assert handle.wait()[1] is Result.SUCCESS
    np.testing.assert_array_equal(held.settled(), np.full(64, 2, np.float32))
    assert cluster[0].world_size == 2


def test_a_device_that_has_failed_is_told_also_by_who_waits_again_after_an_alarm(
    cluster: Cluster, devices: list[FakeDevice], raise_in_handler: Callable[[BaseException], None]
) -> None:
    """What a handler has raised before is the context of all that is raised while it is dealt with."""
    _, handle = ended_on_device(cluster, devices)
    devices[0].fails_to_write = True
    try:
        raise_in_handler(TimeoutError("an alarm"))
    except TimeoutError:
        assert handle.wait() == (False, Result.INTERNAL_ERROR, None)
    until(lambda: cluster[1].world_size == 1, "the other one has heard of it")


def test_what_a_handler_raises_that_takes_itself_away_is_raised(
    cluster: Cluster, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    held, handle = ended_on_device(cluster, devices)
    source = handle._op.source
    assert source is not None

    def stop(*_: object) -> None:
        signal.signal(signal.SIGUSR1, before)
        raise TimeoutError("asked to stop")

    before = signal.signal(signal.SIGUSR1, stop)
    disturb(monkeypatch, source, lambda: signal.raise_signal(signal.SIGUSR1))
    with pytest.raises(TimeoutError, match="asked to stop"):
        handle.wait()
    np.testing.assert_array_equal(held.settled(), np.full(64, 2, np.float32))


def test_a_ctrl_c_comes_out_also_where_the_device_fails_after_it(
    cluster: Cluster, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call says what became of this peer."""
    _, handle = ended_on_device(cluster, devices)
    assert handle._op.source is not None
    devices[0].fails_to_write = True
    disturb(monkeypatch, handle._op.source, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as interrupt:
        handle.wait()
    assert isinstance(interrupt.value.__cause__, PCCLError)
    left = refusal(partial(cluster[0].all_reduce, np.ones(3, np.float32), op=SUM))
    assert left.result is Result.INTERNAL_ERROR
    assert "could not be copied to the device" in str(left)


def test_a_device_whose_library_panics_has_failed(
    cluster: Cluster, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of other languages raise what is no Exception."""
    _, handle = ended_on_device(cluster, devices)

    class Panic(BaseException):
        pass

    def fail() -> None:
        raise Panic

    assert handle._op.source is not None
    disturb(monkeypatch, handle._op.source, fail, 2)
    assert handle.wait() == (False, Result.INTERNAL_ERROR, None)


def test_causes_that_go_around_in_a_circle_are_looked_at_once(
    cluster: Cluster, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, handle = ended_on_device(cluster, devices)

    def fail() -> None:
        one, other = RuntimeError("one"), RuntimeError("other")
        one.__cause__, other.__cause__ = other, one
        raise one

    assert handle._op.source is not None
    disturb(monkeypatch, handle._op.source, fail, 2)
    assert handle.wait() == (False, Result.INTERNAL_ERROR, None)


def test_a_wait_that_is_over_at_once_copies_nothing(cluster: Cluster) -> None:
    cluster.join(2)
    x = [np.ones(8, np.float32) for _ in range(2)]
    handles = [peer.all_reduce_async(array, op=SUM) for peer, array in zip(cluster.peers, x, strict=True)]
    for handle in handles:
        until(handle.done, "it is over")
        assert handle.wait(0)[1] is Result.SUCCESS
        assert handle._op.copy is None
    assert all(np.all(array == 2) for array in x)


COLLECTIVES: dict[str, tuple[Callable[[Communicator, Any], Any], Callable[[Communicator, Any], Any], Any]] = {
    "all_gather": (
        lambda peer, x: peer.launch.all_gather(x),
        lambda peer, x: peer.all_gather(x),
        [[1] * 6, [2] * 6],
    ),
    "reduce_scatter": (
        lambda peer, x: peer.launch.reduce_scatter(x, op=SUM),
        lambda peer, x: peer.reduce_scatter(x, op=SUM),
        [3] * 3,
    ),
    "broadcast": (
        lambda peer, x: peer.launch.broadcast(x, root=1),
        lambda peer, x: peer.broadcast(x, root=1),
        [2] * 6,
    ),
    "recv": (
        lambda peer, x: peer.launch.recv(x, src=1),
        lambda peer, x: peer.send(x, dst=0),
        [2] * 6,
    ),
    "send": (
        lambda peer, x: peer.launch.send(x, dst=1),
        lambda peer, x: peer.recv(x, src=0),
        [1] * 6,
    ),
    "barrier": (lambda peer, _: peer.launch.barrier(), lambda peer, _: peer.barrier(), None),
}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_any_collective_goes_on_with_a_copy(cluster: Cluster, collective: str) -> None:
    cluster.join(2)
    launch, call, expected = COLLECTIVES[collective]
    mine, theirs = np.full(6, 1, np.float32), np.full(6, 2, np.float32)
    handle = launch(cluster[0], mine)
    assert refusal(partial(handle.wait, 0.05)).result is Result.TIMEOUT
    assert np.all(mine == 1)
    mine[:] = MARK
    call(cluster[1], theirs)
    until(handle.done, "it goes on")
    assert np.all(mine == MARK)
    array = handle.result().array
    if collective == "send":  # what was sent is what it was when it was given
        np.testing.assert_array_equal(theirs, expected)
        assert np.all(mine == MARK)
    elif expected is not None:
        np.testing.assert_array_equal(array, expected)
