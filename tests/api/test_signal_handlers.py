"""What a program's signal handlers raise comes out of any call as it is, and what the call was about is in order."""

from __future__ import annotations

import gc
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from pccl import Communicator, PCCLError, ReduceOp, Result, _signal_handlers
from pccl.runtime.data_plane.pieces import piece_elements
from pccl.runtime.session.peer_session import PeerSession
from tests.support.cluster import WAIT_S, Background, Cluster, reduce_once
from tests.support.fake_device import FakeDevice
from tests.support.interrupts import KINDS, AlarmError, refused

ALARMS = 40
SUM = ReduceOp.SUM


@pytest.fixture
def alarms() -> Iterator[threading.Event]:
    """SIGALRM raises AlarmError, and sets the event."""
    has_rung = threading.Event()

    def ring(number: int, frame: object) -> None:
        has_rung.set()
        raise AlarmError("of the program")

    before = signal.signal(signal.SIGALRM, ring)
    yield has_rung
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def reduce_or_timeout(peer: Communicator, x: np.ndarray[Any, Any]) -> Result | None:
    """Reduce with another peer, which may have given the op up."""
    try:
        peer.all_reduce(x, op=SUM, timeout=5)
    except PCCLError as error:
        return error.result
    return None


@pytest.mark.usefixtures("alarms")
@pytest.mark.parametrize("count", [64, 100_000])
def test_alarms_end_the_op_and_nothing_else(cluster: Cluster, count: int) -> None:
    cluster.join(2)
    chance = random.Random(count)
    is_over = False

    def follow() -> None:
        while not is_over:
            given_up = reduce_or_timeout(cluster[1], np.ones(count, np.float32))
            assert given_up in (None, Result.TIMEOUT)

    following = Background(follow)
    for number in range(ALARMS):
        gc.collect()
        gc.disable()  # Python swallows what is raised within a collection of garbage
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0005, 0.02))
            end_s = time.monotonic() + WAIT_S
            while time.monotonic() < end_s:
                x = np.ones(count, np.float32)
                given_up = reduce_or_timeout(cluster[0], x)
                assert np.all(x == 2) if given_up is None else given_up is Result.TIMEOUT
            pytest.fail(f"alarm {number} was swallowed")
        except AlarmError:
            pass
        finally:
            gc.enable()
        assert cluster[0].is_connected
    is_over = True
    following.result()


@pytest.mark.parametrize("is_handle", [False, True])
def test_a_ctrl_c_while_a_result_is_put_on_a_device_leaves_all_of_it(
    cluster: Cluster, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch, is_handle: bool
) -> None:
    cluster.join(2)
    held = [device.array(np.ones(3 * piece_elements(4), np.float32)) for device in devices[:2]]
    write, written = devices[0].write, 0

    def write_and_interrupt(*arguments: Any) -> Any:
        nonlocal written
        done = write(*arguments)
        written += 1
        if written == 2:
            signal.raise_signal(signal.SIGINT)
        return done

    monkeypatch.setattr(devices[0], "write", write_and_interrupt)
    other = Background(partial(cluster[1].all_reduce, held[1], op=SUM))
    wait: Any = partial(cluster[0].all_reduce, held[0], op=SUM)
    if is_handle:
        wait = cluster[0].all_reduce_async(held[0], op=SUM).wait
    with pytest.raises(KeyboardInterrupt):
        wait()
    other.result()
    assert np.all(held[0].settled() == 2)
    assert written > 3


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_an_alarm_in_close_is_no_timeout_of_close(
    cluster: Cluster, alarms: threading.Event, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    cluster.join(1)
    close = PeerSession.close

    async def close_late(session: PeerSession, *arguments: Any) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        await trio.to_thread.run_sync(alarms.wait, WAIT_S)
        await close(session, *arguments)

    monkeypatch.setattr(PeerSession, "close", close_late)
    with pytest.raises(AlarmError):
        cluster[0].close(timeout=timeout)
    monkeypatch.undo()
    cluster[0].close()


def test_a_handler_with_odd_attributes_is_no_hindrance() -> None:
    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

        def __call__(self, number: int, frame: object) -> None:
            raise refused()

    before = signal.signal(signal.SIGUSR1, Odd())
    try:
        with pytest.raises(PCCLError) as raised:
            signal.raise_signal(signal.SIGUSR1)
        assert _signal_handlers.has_raised(raised.value)
        with pytest.raises(PCCLError) as raised:
            raise refused()
        assert not _signal_handlers.has_raised(raised.value)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_other_threads_have_no_handlers() -> None:
    def fail(frame: object) -> None:
        raise refused()

    def call() -> bool:
        try:
            fail(sys._getframe())
        except PCCLError as error:
            return _signal_handlers.has_raised(error)
        return True

    assert not Background(call).result()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("takes_itself_away", [False, True])
def test_what_handlers_raise_is_known_as_theirs(kind: str, takes_itself_away: bool) -> None:
    def handle(*_: object) -> None:
        if takes_itself_away:
            signal.signal(signal.SIGUSR1, before)
        raise KINDS[kind]()

    before = signal.signal(signal.SIGUSR1, handle)
    with pytest.raises(type(KINDS[kind]())) as raised:
        signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert _signal_handlers.has_raised(raised.value)


def test_nothing_is_kept_of_what_is_passed_on() -> None:
    """Arguments of an interrupted call may be large: they live no longer than the exception."""

    def handle(*_: object) -> None:
        raise refused()

    class Argument:
        pass

    def call(argument: Argument) -> None:
        try:
            signal.raise_signal(signal.SIGUSR1)
        except PCCLError as error:
            _signal_handlers.pass_on(error)

    before = signal.signal(signal.SIGUSR1, handle)
    gc.disable()
    try:
        argument = Argument()
        kept = weakref.ref(argument)
        with suppress(PCCLError):
            call(argument)
        del argument
        assert kept() is None
    finally:
        gc.enable()
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("name", ["all_reduce", "update_topology"])
def test_an_alarm_that_is_not_known_as_one_leaves_the_session_alone(cluster: Cluster, name: str) -> None:
    """Its handler has taken itself away, and keeps nothing of what it was called with."""
    cluster.join(2)
    calls = {"all_reduce": partial(cluster[0].all_reduce, np.ones(1, np.float64), op=SUM, timeout=0.5)}
    wake = trio.lowlevel.TrioToken.run_sync_soon

    def ring(number: int, frame: object) -> None:
        del number, frame
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        raise TimeoutError("of the program")

    def wake_late(*arguments: Any, **options: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGUSR1)
        wake(*arguments, **options)

    before = signal.signal(signal.SIGUSR1, ring)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(trio.lowlevel.TrioToken, "run_sync_soon", wake_late)
            with pytest.raises(TimeoutError, match="of the program"):
                calls.get(name, cluster[0].update_topology)()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert cluster[0].is_connected
    if name == "all_reduce":
        assert reduce_or_timeout(cluster[1], np.ones(1, np.float64)) is Result.TIMEOUT
    assert cluster.each(reduce_once) == [2, 2]


def test_what_others_raise_is_not_theirs() -> None:
    def handle(*_: object) -> None:
        raise AssertionError("nobody calls it")

    def refuse(*arrays: np.ndarray[Any, Any]) -> None:
        raise refused()

    before = signal.signal(signal.SIGUSR1, handle)
    with pytest.raises(PCCLError) as raised:
        refuse(np.ones(3), np.ones(4))
    signal.signal(signal.SIGUSR1, before)
    assert not _signal_handlers.has_raised(raised.value)
