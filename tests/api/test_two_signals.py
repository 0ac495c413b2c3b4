"""Two signals that come at once, such as a Ctrl-C of the terminal and a SIGTERM: the second handler raises
where the first one's exception has just begun to be handled. Calls are withdrawn all the same."""

from __future__ import annotations

import _thread
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import trio

from pccl import Communicator, ReduceDescriptor, ReduceOp, ReduceOpDescriptor, SharedState
from pccl.runtime.data_plane.pending import PendingOp
from pccl.runtime.session.launches import Launches
from pccl.runtime.threads import portal
from tests.support.cluster import WAIT_S, Background, Cluster, ones, reduce_once, until
from tests.support.interrupts import at_step

SIGNALS = signal.SIGUSR1, signal.SIGUSR2


class FirstInterrupt(BaseException):
    """Of SIGUSR1."""


class SecondInterrupt(BaseException):
    """Of SIGUSR2."""


@pytest.fixture(autouse=True)
def handlers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("pccl.communicator.INTERRUPT_GRACE_S", 0.001)
    monkeypatch.setattr("pccl.runtime.threads.portal.INTERRUPT_GRACE_S", 0.001)

    def first(*_: object) -> None:
        raise FirstInterrupt

    def second(*_: object) -> None:
        raise SecondInterrupt

    before = [signal.signal(number, handler) for number, handler in zip(SIGNALS, (first, second), strict=True)]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def send_both() -> None:
    """Have both signals come before either of their handlers runs: within one call."""
    list(map(_thread.interrupt_main, SIGNALS))


def interrupt(step: int, call: Callable[[], object], happens: Callable[[], object]) -> bool:
    """Return whether the call slept, or had ended, before it came to that step."""
    try:
        was_last = at_step(step, call, happens)
        for _ in range(3):  # the second one has come by then
            pass
    except SecondInterrupt:
        return False
    return was_last


def steps_of(call: Callable[[], object], settled: Callable[[], object]) -> int:
    """Return at how many places of a call signals may come before it sleeps or has ended."""
    for step in itertools.count():
        was_last = interrupt(step, call, partial(signal.raise_signal, SIGNALS[0]))
        settled()
        if was_last:
            return step
    raise AssertionError


def retry(peer: Communicator) -> None:
    descriptors = [
        ReduceOpDescriptor.from_numpy(x, x, ReduceDescriptor(8, ReduceOp.SUM, tag=tag))
        for tag, x in enumerate([ones()] * 2)
    ]
    peer.all_reduce_multiple_with_retry(descriptors)


CALLS: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda peer: peer.all_reduce(ones(), op=ReduceOp.SUM),
    "all_reduce for 60 s": lambda peer: peer.all_reduce(ones(), op=ReduceOp.SUM, timeout=60),
    "all_reduce_multiple_with_retry": retry,
    "update_topology": lambda peer: peer.update_topology(),
    "sync_shared_state": lambda peer: peer.sync_shared_state(SharedState.from_numpy({"x": ones()})),
}


def is_in_no_call(peer: Communicator) -> bool:
    session = peer._inner._session
    assert session is not None
    portal.current().call(trio.lowlevel.checkpoint)  # what was on its way to the trio thread has come there
    return not session._calls and not session._table


@pytest.mark.parametrize("name", CALLS)
def test_two_signals_anywhere_in_a_call_withdraw_it(cluster: Cluster, name: str) -> None:
    cluster.join(2)
    call = partial(CALLS[name], cluster[0])

    def withdrawn(what: str = "it has been withdrawn") -> None:
        until(partial(is_in_no_call, cluster[0]), what, limit_s=10)

    steps = steps_of(call, withdrawn)
    assert steps > 20
    for step in range(steps + 1):
        interrupt(step, call, send_both)
        withdrawn(f"withdrawn after both signals at step {step}")
    assert cluster.each(reduce_once) == [2, 2]


def test_two_signals_anywhere_in_a_launch_withdraw_it(cluster: Cluster) -> None:
    cluster.join(2)
    handle: Any = None

    def call() -> None:
        nonlocal handle
        handle = cluster[0].all_reduce_async(ones(), op=ReduceOp.SUM)

    for step in itertools.count():
        if interrupt(step, call, send_both):
            assert step > 20
            break
        until(partial(is_in_no_call, cluster[0]), f"withdrawn after both signals at step {step}", limit_s=10)


def test_two_signals_anywhere_in_connect_withdraw_it(cluster: Cluster) -> None:
    cluster.join(1)
    newcomer = cluster.new()

    def withdrawn() -> None:
        until(lambda: not newcomer._inner._is_connecting, "it has given up", limit_s=10)
        until(lambda: not cluster[0].are_peers_pending(), "it has withdrawn", limit_s=10)

    for step in range(steps_of(newcomer.connect, withdrawn) + 1):
        newcomer = cluster.new()
        interrupt(step, newcomer.connect, send_both)
        withdrawn()
    cluster.admit([newcomer])
    assert cluster.each(reduce_once) == [2, 2]


def test_signals_as_an_op_ends_free_its_tag(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one's exception ends the handling of the first one's before the call gives up, the third one's the
    first attempt to do so."""
    cluster.join(2)
    before = signal.signal(signal.SIGALRM, signal.getsignal(SIGNALS[0]))
    assert cluster.each(reduce_once) == [2, 2]
    let_go = Launches.let_go

    def interrupted(launches: Launches, op: PendingOp) -> None:
        if op.is_over and threading.current_thread() is threading.main_thread():
            monkeypatch.undo()
            list(map(_thread.interrupt_main, (*SIGNALS, signal.SIGALRM)))
        let_go(launches, op)

    monkeypatch.setattr(Launches, "let_go", interrupted)
    other = Background(partial(reduce_once, cluster[1]))
    with pytest.raises(FirstInterrupt) as raised:
        cluster[0].all_reduce(ones(), op=ReduceOp.SUM)
    signal.signal(signal.SIGALRM, before)
    assert isinstance(raised.value.__context__, SecondInterrupt)
    other.result()
    assert cluster.each(reduce_once) == [2, 2]


@pytest.mark.parametrize("wait_s", [None, WAIT_S])
def test_two_signals_anywhere_in_a_wait_for_a_handle_give_its_arrays_back(
    cluster: Cluster, wait_s: float | None
) -> None:
    cluster.join(2)
    for step in itertools.count(2):  # after the calls of these functions
        handle = cluster[0].all_reduce_async(ones(), op=ReduceOp.SUM)
        slept = interrupt(step, partial(handle.wait, wait_s), partial(signal.raise_signal, SIGNALS[0]))
        again = cluster[0].all_reduce_async(ones(), op=ReduceOp.SUM, tag=1)
        interrupt(step, partial(again.wait, wait_s), send_both)
        assert again._op.is_released, f"the arrays are the caller's after both signals at step {step}"
        for tag, each in enumerate((handle, again)):
            cluster[1].all_reduce(ones(), op=ReduceOp.SUM, tag=tag)
            assert each.wait()[0]
        if slept:
            break
    assert cluster.each(reduce_once) == [2, 2]
