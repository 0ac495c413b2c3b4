"""Connections over UDP between peers, and what takes their place where there are none."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from pccl import MasterNode
from pccl.protocol.peer.links import Limit, Links
from pccl.runtime.data_plane.engine import Engine
from pccl.runtime.network import datagrams
from pccl.runtime.network.datagrams import SECRET_BYTES, Datagrams
from pccl.status import run_status
from tests.runtime.network.test_shared_memory import check_sums
from tests.support.cluster import Cluster, until

TOKEN = "a token of these tests"

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="UDP is used on Linux alone")


class Seen:
    def __init__(self) -> None:
        self.added: list[Datagrams] = []
        self.lost: list[str] = []
        self.grown: list[Limit] = []


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What becomes of UDP on links that ask for it as soon as they are up."""
    found = Seen()
    connected, connection_lost, grow, add = Links.connected, Links.connection_lost, Links._grow, Engine.link_add_udp

    def ask(links: Links, link: int) -> bool:
        is_taken = connected(links, link)
        made = links._find(link)
        if made is not None and made.is_up and made.dial:
            links.limited(link, 0, Limit.LOSS)
        return is_taken

    def lose(links: Links, link: int, reason: str, thread: int = 0, over_udp: bool = False) -> None:
        if over_udp:
            found.lost.append(reason)
        connection_lost(links, link, reason, thread, over_udp)

    def note_growth(links: Links, link: Any, thread: int, limit: Limit) -> None:
        found.grown.append(limit)
        grow(links, link, thread, limit)

    def note_added(engine: Engine, link: int, index: int, added: Datagrams) -> bool:
        found.added.append(added)
        return add(engine, link, index, added)

    monkeypatch.setenv("PCCL_SHM", "0")
    monkeypatch.setattr(Links, "connected", ask)
    monkeypatch.setattr(Links, "connection_lost", lose)
    monkeypatch.setattr(Links, "_grow", note_growth)
    monkeypatch.setattr(Engine, "link_add_udp", note_added)
    return found


def reduce_among(world: int, is_enough: Callable[[], bool], **options: Any) -> None:
    """Reduce arrays until enough has happened, and once more."""
    with MasterNode("127.0.0.1:0", token=options.get("token")) as master:
        cluster = Cluster(master.address, **options)
        cluster.join(world)

        def reduce_all() -> bool:
            was_enough = is_enough()
            check_sums(cluster)
            return was_enough

        try:
            until(reduce_all, "UDP has been tried")
        finally:
            cluster.close_all()


@pytest.mark.parametrize("encrypt", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_both_ends_of_a_link_use_udp(world: int, encrypt: bool, seen: Seen) -> None:
    pairs = world * (world - 1) // 2
    options: dict[str, Any] = {"token": TOKEN, "encrypt": True} if encrypt else {}
    reduce_among(world, lambda: len(seen.added) >= 2 * pairs, **options)
    assert sum(each.is_dialer for each in seen.added) >= pairs
    assert sum(not each.is_dialer for each in seen.added) >= pairs
    assert {each.keys is not None for each in seen.added} == {encrypt}
    assert len({each.secret for each in seen.added}) >= pairs


def test_link_stays_on_tcp_where_datagrams_are_lost(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_another(stream: Any, secret: bytes, port: int) -> Datagrams:
        return Datagrams(datagrams._bound(stream, 0), bytes(SECRET_BYTES), is_dialer=False)

    monkeypatch.setattr(datagrams, "open_offered", open_another)
    reduce_among(2, lambda: Limit.LOSS in seen.grown)
    assert any("UDP does not get through" in reason for reason in seen.lost)


@pytest.mark.parametrize("function", ["offer", "open_offered"])
def test_link_stays_on_tcp_where_one_end_has_no_udp(function: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(*_: object) -> Datagrams:
        raise OSError("no UDP")

    monkeypatch.setattr(datagrams, function, deny)
    reduce_among(2, lambda: Limit.LOSS in seen.grown)
    assert seen.added == []


def test_without_the_variable_links_use_tcp(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_UDP", "0")
    reduce_among(2, lambda: Limit.LOSS in seen.grown)
    assert (seen.added, seen.lost) == ([], []), "it is not tried"


def test_status_shows_links_that_use_udp(master: MasterNode, seen: Seen) -> None:
    cluster = Cluster(master.address)
    cluster.join(2)

    def are_shown() -> bool:
        check_sums(cluster)
        links = [link for member in run_status(master.address).members for link in member.traffic.links]
        return len(links) == 2 and all(link.is_udp for link in links)

    until(are_shown, "both directions use UDP")
    cluster.close_all()


@pytest.mark.parametrize(("secret", "port"), [(b"", 1), (bytes(SECRET_BYTES), 0), (bytes(SECRET_BYTES), 65536)])
def test_offers_are_checked(secret: bytes, port: int) -> None:
    with pytest.raises(OSError, match="offer"):
        datagrams.open_offered(None, secret, port)  # type: ignore[arg-type]
