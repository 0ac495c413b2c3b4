"""How the ranks of a group find each other where something goes wrong on the way."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from pccl.errors import PCCLError
from pccl.types import Result

pytest.importorskip("torch")

import torch.distributed as dist

from pccl.torch import bootstrap
from pccl.torch.errors import Names

LIMIT_S = 30.0


class _Hosting:
    """Masters that are addresses only."""

    made: list[_Hosting]

    def __init__(self, host: str, token: str, *, founders: int = 1, standby_of: str = "") -> None:
        self.is_retired = False
        _Hosting.made.append(self)
        self.master = standby_of
        self.address = f"127.0.0.1:{10 + len(_Hosting.made)}" if standby_of else "127.0.0.1:1"

    def retire(self, after_s: float | None = None) -> None:
        self.is_retired = True


class _Communicator:
    """A communicator whose first attempts to connect fail."""

    failures: list[Result]
    made: list[_Communicator]

    def __init__(self, masters: str, **_: Any) -> None:
        self.masters = masters
        self.is_closed = False
        _Communicator.made.append(self)

    def connect(self, *_: object, **__: object) -> None:
        if _Communicator.failures:
            raise PCCLError(_Communicator.failures.pop(0), "connect", "no master has taken over within 5 s")

    def close(self, **_: object) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PCCL_MASTER", raising=False)
    _Hosting.made, _Communicator.made, _Communicator.failures = [], [], []
    monkeypatch.setattr(bootstrap, "Hosting", _Hosting)
    monkeypatch.setattr(bootstrap, "Communicator", _Communicator)
    monkeypatch.setattr(bootstrap, "be_of_rank", lambda *_: None)
    monkeypatch.setattr(bootstrap, "exchange", lambda communicator, rank, size, deadline_s: (tuple(range(size)),) * 2)


def _record(store: Any, token: str) -> None:
    store.set(bootstrap.KEY, json.dumps({"address": "127.0.0.1:1", "token": token}))


class _StoreAt:
    """A store that is reached at some host."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._store = dist.HashStore()

    def __getattr__(self, name: str) -> Any:
        if name == "underlying_store":
            raise AttributeError(name)
        return getattr(self._store, name)


def names(rank: int) -> Names:
    return Names("a group", rank, range(3))


def _meets(store: Any, rank: int, limit_s: float = LIMIT_S) -> Callable[[], bootstrap.Meeting]:
    """Have a rank meet others in a thread. Return a function that waits for its meeting."""
    found: list[bootstrap.Meeting] = []
    thread = threading.Thread(
        target=lambda: found.append(bootstrap.meet(store, names(rank), 3, limit_s, is_default=False)),
        daemon=True,
    )
    thread.start()

    def meeting() -> bootstrap.Meeting:
        thread.join(limit_s / 2)
        assert found, "it has not met the others"
        return found[0]

    return meeting


def test_retry_keeps_standby() -> None:
    """The others may have read its address."""
    store = dist.HashStore()
    _record(store, "secret")
    store.set(f"{bootstrap.KEY}/secret/2", "127.0.0.1:12")
    _Communicator.failures = [Result.MASTER_CONNECTION_FAILED] * 2
    meeting = _meets(store, 1)()
    assert [each.masters for each in _Communicator.made] == ["127.0.0.1:1,127.0.0.1:11,127.0.0.1:12"] * 3
    assert [each.is_closed for each in _Communicator.made] == [True, True, False]
    assert [each.is_retired for each in _Hosting.made] == [False]
    assert meeting.hosting is _Hosting.made[0]


@pytest.mark.parametrize(
    ("store_host", "master_host"), [("192.0.2.1", "192.0.2.1"), ("::1", "127.0.0.1"), ("localhost", "127.0.0.1")]
)
def test_loopback_address_means_store_host(store_host: str, master_host: str) -> None:
    """As where MASTER_ADDR is localhost on the first host and its name on the others."""
    store = _StoreAt(store_host)
    _record(store, "secret")
    store.set(f"{bootstrap.KEY}/secret/2", "127.0.0.1:12")
    _meets(store, 1)()
    assert _Hosting.made[0].master == f"{master_host}:1"
    assert _Communicator.made[0].masters == ",".join(f"{master_host}:{port}" for port in (1, 11, 12))


def test_first_rank_retries() -> None:
    store = dist.HashStore()
    _Communicator.failures = [Result.MASTER_CONNECTION_FAILED]
    meeting = _meets(store, 0)
    store.wait([bootstrap.KEY], timedelta(seconds=LIMIT_S))
    token = json.loads(store.get(bootstrap.KEY))["token"]
    for rank in (1, 2):
        store.set(f"{bootstrap.KEY}/{token}/{rank}", f"127.0.0.1:{10 + rank}")
    assert meeting().hosting is _Hosting.made[0]
    assert [each.is_closed for each in _Communicator.made] == [True, False]
    assert not store.check([bootstrap.KEY])


@pytest.mark.parametrize("rank", [0, 1])
def test_permanent_failure_raised(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    store = dist.HashStore()
    _Communicator.failures = [Result.RANK_CONNECTION_FAILED]
    if rank:
        _record(store, "secret")
    for other in (1, 2):
        store.set(f"{bootstrap.KEY}/secret/{other}", "127.0.0.1:12")
    monkeypatch.setattr(bootstrap.secrets, "token_hex", lambda _: "secret")
    with pytest.raises(PCCLError):
        bootstrap.meet(store, names(rank), 3, LIMIT_S, is_default=False)
    assert all(each.is_retired for each in _Hosting.made)
    assert all(each.is_closed for each in _Communicator.made)


def test_timeout_names_missing_standby() -> None:
    store = dist.HashStore()
    _record(store, "secret")
    with pytest.raises(dist.DistStoreError, match=r"a group timed out on rank 1 after .* s: rank 2 has not"):
        bootstrap.meet(store, names(1), 3, 1.5, is_default=False)
    assert [each.is_retired for each in _Hosting.made] == [True]
