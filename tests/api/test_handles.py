"""Ops that are given up at any moment, by some or all peers: the arrays are the callers' again and unchanged when the
error comes, pccl does not touch them afterwards, and all peers get the same verdict."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import (
    Communicator,
    MasterNode,
    MismatchError,
    OpTimeoutError,
    OutcomeUnknownError,
    PCCLError,
    QuantizationOptions,
    ReduceAlgorithm,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    Result,
)
from tests.support.cluster import Background, Cluster, outcomes, refusal, results, until, waits_at_master
from tests.support.fake_device import FakeDevice

WORLD = 3
ROUNDS = 150
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

    def _cancel(self, peer: Communicator) -> None:
        handle = self._launch(peer)
        for _ in range(2):
            if handle.wait(self.timeout_s)[0]:
                return
        handle.cancel()
        handle.result()

    def _many(self, peer: Communicator) -> None:
        descriptor = ReduceDescriptor(
            self.send.size, SUM, self.tag, quantization_options=self.quantization, algorithm=self.algorithm
        )
        descriptors = [ReduceOpDescriptor.from_numpy(self.send, self.recv, descriptor)]
        peer.all_reduce_multiple_with_retry(descriptors, timeout=self.timeout_s)


def has_decided(peer: Communicator) -> bool:
    return peer.stats["ops_open"] == 0


def attempts(rng: random.Random, tag: int) -> list[Attempt]:
    count = rng.choice(COUNTS)
    quantization = QuantizationOptions() if rng.random() < 0.2 else None
    algorithm = rng.choice((None, ReduceAlgorithm.RING, ReduceAlgorithm.DIRECT))
    found = []
    for index in range(WORLD):
        send = np.full(count, index + 1, np.float32)
        recv = send if rng.random() < 0.6 else np.empty_like(send)
        how = rng.choice(("call", "call", "cancel", "cancel", "many"))
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
        assert set(found) <= {Result.SUCCESS, Result.TIMEOUT, Result.OUTCOME_UNKNOWN}, found
        assert not {Result.SUCCESS, Result.TIMEOUT} <= set(found), found
        for each, result in zip(made, found, strict=True):
            if result is Result.SUCCESS:
                assert np.allclose(each.recv, sum(range(1, WORLD + 1)), atol=0.1)
            else:
                given_up.append(each)
    for peer in cluster.peers:
        until(partial(has_decided, peer), "all have their verdicts")
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
def test_timeout_and_cancel_return_arrays_untouched(cluster_of_kind: Cluster, seed: int) -> None:
    hammer(cluster_of_kind, seed)


@pytest.fixture
def stopped_master(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster], None]:
    """A function that cuts off the master from what its peers send."""

    def stop(cluster: Cluster) -> None:
        for peer in cluster.peers:
            session = peer._inner._session
            assert session is not None
            monkeypatch.setattr(session._master.connection, "send", lambda _: None)

    monkeypatch.setattr("pccl.communicator.CANCEL_GRACE_S", 0.2)
    monkeypatch.setattr("pccl.handle.CANCEL_GRACE_S", 0.2)
    return stop


def test_timeout_without_master_is_outcome_unknown(cluster: Cluster, stopped_master: Callable[[Cluster], None]) -> None:
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
    assert "its caller gave it up" in str(again)
    y = np.ones(8, np.float32)
    many = [ReduceOpDescriptor.from_numpy(y, y, ReduceDescriptor(8, SUM, tag)) for tag in (4, 5)]
    failed = refusal(partial(cluster[0].all_reduce_multiple_with_retry, many, timeout=0.1))
    assert failed.result is Result.OUTCOME_UNKNOWN
    assert "tags [4, 5]" in str(failed)
    assert np.all(y == 1)


def test_cancel_without_master_is_outcome_unknown(cluster: Cluster, stopped_master: Callable[[Cluster], None]) -> None:
    cluster.join(2)
    stopped_master(cluster)
    x = np.ones(8, np.float32)
    handle = cluster[0].all_reduce_async(x, op=SUM)
    failed = refusal(handle.cancel)
    assert isinstance(failed, OutcomeUnknownError)
    assert np.all(x == 1)


def test_wait_timeout_leaves_op_in_flight(cluster: Cluster) -> None:
    cluster.join(2)
    x, part = np.ones(100_000, np.float32), np.ones(4, np.float32)
    handle = cluster[0].all_reduce_async(x, op=SUM)
    gathering = cluster[0].launch.all_gather(part, tag=1)
    assert handle.wait(0.01) == (False, Result.TIMEOUT, None)
    assert gathering.wait(0.01) is False
    late = refusal(partial(handle.result, 0.01))
    assert isinstance(late, OpTimeoutError)
    assert "still in flight" in str(late)
    assert not handle.done()
    cluster[1].all_reduce(x.copy(), op=SUM)
    cluster[1].all_gather(part, tag=1)
    assert handle.wait()[:2] == (True, Result.SUCCESS)
    assert np.all(x == 2)
    assert gathering.wait() is True
    assert gathering.result().array.tolist() == [[1] * 4] * 2


def test_cancel_aborts_op_on_all_peers(cluster: Cluster) -> None:
    cluster.join(WORLD)
    arrays = [np.full(20_000, index, np.float32) for index in range(WORLD)]
    handles = [peer.all_reduce_async(x, op=SUM) for peer, x in zip(cluster.peers[:2], arrays, strict=False)]
    assert handles[0].cancel() is True
    assert np.all(arrays[0] == 0)
    assert handles[1].wait()[:2] == (False, Result.TIMEOUT)
    assert isinstance(refusal(handles[0].result), OpTimeoutError)
    assert refusal(partial(cluster[2].all_reduce, arrays[2], op=SUM)).result is Result.TIMEOUT
    assert all(np.all(x == index) for index, x in enumerate(arrays))
    assert handles[0].cancel() is True
    assert cluster.each(lambda peer, _: peer.all_reduce(np.ones(5, np.float32), op=SUM).world_size) == [WORLD] * WORLD


LOOKS: dict[str, Callable[[Any], Any]] = {
    "unpacks": lambda handle: [*handle.wait()],
    "indexes": lambda handle: handle.wait()[0],
    "compares": lambda handle: handle.wait() == (True, Result.SUCCESS, None),
    "result": lambda handle: refusal(handle.result),
    "cancel": lambda handle: handle.cancel(),
}
NO_LOOKS: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda _: None,
    "wait": lambda handle: handle.wait(),
    "done": lambda handle: handle.done(),
}


def failed_op(cluster: Cluster, kind: str = "all_reduce") -> Any:
    """Return the handle of an op that the other peer has aborted."""
    handle = getattr(cluster[0].launch, kind)(np.ones(8, np.float32), tag=5)
    assert isinstance(refusal(partial(cluster[1].all_reduce, np.ones(9, np.float32), tag=5, timeout=60)), MismatchError)
    until(handle.done, "it has failed")
    return handle


def dropped(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return the records of handles that were dropped with a failure."""
    return [record for record in caplog.records if record.name == "pccl.handle"]


@pytest.mark.parametrize("look", NO_LOOKS)
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_failure_that_the_program_never_looks_at_is_one_warning(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, look: str, kind: str
) -> None:
    cluster.join(2)
    handle = failed_op(cluster, kind)
    NO_LOOKS[look](handle)
    assert not dropped(caplog)
    del handle
    gc.collect()
    (record,) = dropped(caplog)
    assert record.levelname == "WARNING"
    assert "the op with tag 5 failed, and its Async" in record.getMessage()
    assert "await: INVALID_" in record.getMessage()


@pytest.mark.parametrize("look", LOOKS)
def test_failure_that_the_program_looks_at_is_no_warning(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, look: str
) -> None:
    cluster.join(2)
    handle = failed_op(cluster)
    LOOKS[look](handle)
    del handle
    gc.collect()
    assert not dropped(caplog)


def test_failure_after_the_handle_was_dropped_is_a_warning(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    cluster.join(2)
    cluster[0].launch.barrier(tag=5)
    refusal(partial(cluster[1].all_reduce, np.ones(9, np.float32), tag=5))
    (record,) = until(lambda: dropped(caplog), "it is logged")
    assert "its AsyncCollectiveHandle was dropped" in record.getMessage()


def test_reference_unpacks_the_tuple_of_a_failed_wait(cluster: Cluster) -> None:
    cluster.join(2)
    found = failed_op(cluster).wait()
    is_success, status, info = found
    assert (is_success, status.name, info) == (False, "INVALID_ARGUMENT", None)
    assert isinstance(found, tuple)
    assert not found[0]
    assert found[1:] == (Result.INVALID_ARGUMENT, None)
    assert hash(found) == hash((False, Result.INVALID_ARGUMENT, None))


def test_cancel_after_the_end_keeps_the_result(cluster: Cluster) -> None:
    cluster.join(2)
    x = np.ones(8, np.float32)
    handle = cluster[0].all_reduce_async(x, op=SUM)
    cluster[1].all_reduce(x.copy(), op=SUM)
    assert handle.wait()[0]
    assert handle.cancel() is False
    assert np.all(x == 2)
    assert handle.result().world_size == 2


def test_cancel_of_an_op_that_has_not_begun(cluster: Cluster) -> None:
    """While the ring changes, ops are queued."""
    cluster.join(2)
    newcomer = cluster.new()
    connecting = Background(newcomer.connect)
    until(partial(waits_at_master, newcomer), "it waits")
    admitting = Background(cluster[0].update_topology)  # exclusive: what is launched now waits for it
    until(lambda: is_in_call(cluster[0]), "it is in the call")
    x = np.full(100_000, 2, np.float32)
    handle = cluster[0].all_reduce_async(x, op=SUM, tag=1)
    gathering = cluster[0].launch.all_gather(x, tag=2)
    assert handle.cancel() is True
    assert gathering.cancel() is True
    assert np.all(x == 2)
    cluster[1].update_topology()
    admitting.result()
    connecting.result()


def is_in_call(peer: Communicator) -> bool:
    session = peer._inner._session
    return session is not None and session._machine._calls.kind != ""


def test_cancel_returns_an_array_on_a_device(cluster: Cluster, devices: list[FakeDevice]) -> None:
    cluster.join(2)
    held = [devices[index].array(np.full(50_000, index + 1, np.float32)) for index in range(2)]
    handle = cluster[0].all_reduce_async(held[0], op=SUM)
    assert handle.wait(0.05) == (False, Result.TIMEOUT, None)
    assert handle.cancel() is True
    assert refusal(partial(cluster[1].all_reduce, held[1], op=SUM)).result is Result.TIMEOUT
    for index, array in enumerate(held):
        np.testing.assert_array_equal(array.settled(), np.full(50_000, index + 1, np.float32))


def test_device_that_cannot_take_a_result_ends_the_session(cluster: Cluster, devices: list[FakeDevice]) -> None:
    cluster.join(WORLD)
    held = [devices[index].array(np.full(50_000, index + 1, np.float32)) for index in range(WORLD)]
    devices[0].fails_to_write = True
    failed = cluster.outcomes(lambda peer, i: peer.all_reduce(held[i], op=SUM))
    assert results(failed) == [Result.INTERNAL_ERROR, Result.SUCCESS, Result.SUCCESS]
    assert "this peer has left the run" in str(failed[0])
    until(lambda: cluster[1].world_size == cluster[2].world_size == 2, "the others have seen it")
    left = refusal(partial(cluster[0].all_reduce, np.ones(3, np.float32), op=SUM))
    assert left.result is Result.INTERNAL_ERROR
    assert "could not be copied to the device" in str(left)
