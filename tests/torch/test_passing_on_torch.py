"""What a signal handler raises comes out of the process group as it is, also where it expects its type."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from pccl.errors import PCCLError  # noqa: E402
from pccl.torch import bootstrap, rendezvous  # noqa: E402
from pccl.torch.alone import Alone  # noqa: E402
from pccl.torch.errors import Names  # noqa: E402
from pccl.torch.fault_tolerance import AbortHooks  # noqa: E402
from pccl.torch.hosting import advertised_host  # noqa: E402
from pccl.torch.rendezvous import Handle, Join, _Guest, _visit  # noqa: E402
from pccl.torch.scheduler import LEFT, Scheduler  # noqa: E402
from pccl.torch.torchft import ProcessGroupPCCL  # noqa: E402
from pccl.torch.work import PCCLWork  # noqa: E402
from pccl.types import Result  # noqa: E402
from tests.support.interrupts import AlarmError  # noqa: E402
from tests.support.ringing import Ring, ringing  # noqa: E402

LOST = PCCLError(Result.RANK_CONNECTION_LOST, "a call", f"made by a signal handler: {LEFT}")
JOIN = Join(1, "digest", "id")


@pytest.fixture
def host() -> Iterator[Handle]:
    """The handle of one who hears and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Handle("0" * 16, "127.0.0.1", server.getsockname()[1], "host:0")


def visit(host: Handle) -> Any:
    return _visit(JOIN, host, time.monotonic() + 60, 60.0, None)  # type: ignore[arg-type]


def test_an_alarm_is_no_timeout_of_a_rendezvous(host: Handle) -> None:
    def ring(*_: object) -> None:
        raise AlarmError("of the program")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(AlarmError):
            visit(host)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("error", [AlarmError("of the program"), ConnectionResetError(0, "of the program")], ids=repr)
@pytest.mark.parametrize("place", ["socket.create_connection", "_Guest.hear"])
def test_a_rendezvous_has_not_failed(
    monkeypatch: pytest.MonkeyPatch, host: Handle, place: str, error: Exception
) -> None:
    with ringing(error) as ring:
        monkeypatch.setattr(f"pccl.torch.rendezvous.{place}", ring)
        visit(host)


def test_a_guest_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConnectionResetError(0, "of the program")
    with ringing(error) as ring:
        _Guest(SimpleNamespace(recv=ring)).hear()  # type: ignore[arg-type]
    with ringing(error) as ring:
        _Guest(SimpleNamespace(sendall=ring)).send(JOIN)  # type: ignore[arg-type]
    with ringing(rendezvous.msgspec.DecodeError()) as ring:
        monkeypatch.setattr(rendezvous, "_decoder", SimpleNamespace(decode=ring))
        _Guest(SimpleNamespace(recv=lambda _: b"{}\n")).hear()  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [AlarmError("of the program"), LOST], ids=repr)
def test_a_reconfigure_has_not_failed(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    group = ProcessGroupPCCL(timedelta(seconds=20))
    with ringing(error) as ring, monkeypatch.context() as patched:
        patched.setattr(group._reconfigurer, "enter", ring)
        options = SimpleNamespace(uuid=1, handles=[group.get_reconfigure_handle()], timeout=None)
        group.reconfigure(options)
    with ringing(rendezvous.RendezvousError()) as ring, monkeypatch.context() as patched:
        patched.setattr(group._reconfigurer, "members", ring)
        group.reconfigure(options)
    group.shutdown()


@pytest.mark.parametrize("error", [AlarmError("of the program"), LOST], ids=repr)
def test_a_configure_of_torchft_has_not_failed(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    group = ProcessGroupPCCL(timedelta(seconds=20))
    monkeypatch.setattr("pccl.torch.torchft._store", lambda *_: dist.HashStore())
    with ringing(error) as ring:
        monkeypatch.setattr(bootstrap, "meet", ring)
        group.configure("127.0.0.1:1/1", "replica", 0, 2)
    group.shutdown()


@pytest.mark.parametrize("error", [AlarmError("of the program"), LOST], ids=repr)
def test_an_init_has_not_failed(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    with ringing(error) as ring:
        monkeypatch.setattr(bootstrap, "meet", ring)
        dist.init_process_group("pccl", store=dist.HashStore(), rank=0, world_size=2)


def test_a_first_rank_is_not_looked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with ringing(PCCLError(Result.MASTER_CONNECTION_FAILED, "connect", "made by a signal handler")) as ring:
        monkeypatch.setattr("pccl.communicator.Communicator.connect", ring)
        bootstrap._connected("127.0.0.1:1", "0" * 32, 0, 2, time.monotonic() + 60)


def test_a_host_has_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with ringing(AlarmError("of the program")) as ring:
        monkeypatch.setattr("pccl.torch.hosting.socket.getaddrinfo", ring)
        advertised_host("somewhere")


def test_a_hook_has_not_failed() -> None:
    hooks = AbortHooks()
    with ringing(AlarmError("of the program")) as ring:
        hooks.add(1, ring)
        hooks.call()


class Ringing(Alone):
    """A process group in whose ops a signal comes."""

    def __init__(self, ring: Ring) -> None:
        super().__init__(Names("the default group", 0, [0]))
        self.run = self.launch = self.give_up = ring  # type: ignore[assignment]

    def may_repeat(self, *_: object) -> bool:
        return True

    def later(self, call: object) -> None:
        raise AssertionError("nothing is to be repeated")


def script() -> Any:
    yield [SimpleNamespace(pair=None)]


ERRORS = [StopIteration(), LOST, AlarmError("of the program")]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_call_that_goes_through_its_script_has_not_succeeded(error: Exception) -> None:
    with ringing(error) as ring:
        Scheduler.run_script(Ringing(ring), script(), "all_reduce", 60.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_a_work_that_is_run_has_not_succeeded(error: Exception) -> None:
    with ringing(error) as ring:
        work = PCCLWork(Ringing(ring), "all_reduce", script(), 0, 60.0, True)
        work.run()
        assert not work.is_success()
        work.wait()
