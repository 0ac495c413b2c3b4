"""The rendezvous of a reconfigure: who meets whom, and what everybody is told where they do not."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch")

from pccl.torch.rendezvous import Endpoint, Handle, Invitation, Masters, RendezvousError, ordered
from tests.support.cluster import Background

LIMIT_S = 20.0


class Meeting:
    """Endpoints of this process, and calls of theirs made at the same time."""

    def __init__(self, count: int) -> None:
        self.endpoints = [Endpoint("127.0.0.1", f"host:{rank}") for rank in range(count)]
        self.handles = [str(endpoint.handle) for endpoint in self.endpoints]
        self.standbys: list[str] = []

    def masters(self, rank: int) -> Masters:
        def stand_by(master: str, token: str) -> str:
            self.standbys.append(token)
            return f"standby-{rank}:1"

        return Masters(lambda founders, token: f"master-of-{founders}:1", stand_by)

    def call(self, rank: int, uuid: int, handles: list[str] | None = None, timeout_s: float = LIMIT_S) -> Background:
        given = self.handles if handles is None else handles
        return Background(
            lambda: _outcome(partial(self.endpoints[rank].meet, uuid, given, timeout_s, self.masters(rank)))
        )


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except RendezvousError as error:
        return error


@pytest.fixture
def meeting() -> Iterator[Callable[[int], Meeting]]:
    made: list[Meeting] = []

    def make(count: int) -> Meeting:
        made.append(Meeting(count))
        return made[-1]

    yield make
    for each in made:
        for endpoint in each.endpoints:
            endpoint.close()


def test_all_meet_at_the_first_of_the_handles(meeting: Callable[[int], Meeting]) -> None:
    four = meeting(4)
    found: list[Invitation] = [call.result() for call in [four.call(rank, 7) for rank in range(4)]]
    assert len(set(found)) == 1
    masters = found[0].masters.split(",")
    assert masters[0] == "master-of-4:1"
    assert sorted(masters[1:]) == ["standby-1:1", "standby-2:1"]
    assert four.standbys == [found[0].token] * 2


def test_the_order_of_the_handles_says_who_is_first(meeting: Callable[[int], Meeting]) -> None:
    three = meeting(3)
    handles = [three.handles[rank] for rank in (2, 0, 1)]
    calls = [three.call(rank, 1, handles) for rank in range(3)]
    assert len({call.result() for call in calls}) == 1


def test_who_is_not_named_is_not_waited_for(meeting: Callable[[int], Meeting]) -> None:
    three = meeting(3)
    handles = three.handles[:2]
    assert [type(call.result()) for call in [three.call(rank, 1, handles) for rank in range(2)]] == [Invitation] * 2


def test_a_uuid_is_used_once_even_where_it_failed(meeting: Callable[[int], Meeting]) -> None:
    two = meeting(2)
    assert "did not call reconfigure with uuid 5" in str(two.call(0, 5, timeout_s=0.05).result())
    assert "uuid 5 was already used" in str(two.call(0, 5).result())
    late = str(two.call(1, 5).result())
    assert "host:0, the first of the handles, says: timed out" in late
    both = [two.call(0, 6), two.call(1, 6)]
    assert len({call.result() for call in both}) == 1


def test_who_has_not_come_is_named_to_all(meeting: Callable[[int], Meeting]) -> None:
    three = meeting(3)
    calls = [three.call(0, 1, timeout_s=0.5), three.call(1, 1)]
    for call in calls:
        text = str(call.result())
        assert "timed out" in text
        assert "rank 2 (host:2) of 3 did not call reconfigure with uuid 1" in text


def test_a_dead_host_is_noticed_at_once(meeting: Callable[[int], Meeting]) -> None:
    two = meeting(2)
    two.endpoints[0].close()
    began_s = time.monotonic()
    assert "host:0 at 127.0.0.1" in (text := str(two.call(1, 1).result()))
    assert "cannot be reached" in text
    assert time.monotonic() - began_s < LIMIT_S / 2


def test_a_dead_rank_is_noticed_at_once_by_all(meeting: Callable[[int], Meeting]) -> None:
    three = meeting(3)
    three.endpoints[2].close()
    began_s = time.monotonic()
    for call in [three.call(rank, 1) for rank in range(2)]:
        assert "host:2 cannot be reached at 127.0.0.1" in str(call.result())
    assert time.monotonic() - began_s < LIMIT_S / 2


def test_a_host_that_does_not_call_is_named(meeting: Callable[[int], Meeting]) -> None:
    two = meeting(2)
    text = str(two.call(1, 3, timeout_s=0.1).result())
    assert "timed out" in text
    assert "host:0" in text
    assert "uuid 3" in text


def test_other_handles_are_an_error_for_all(meeting: Callable[[int], Meeting]) -> None:
    three = meeting(3)
    swapped = [three.handles[0], three.handles[2], three.handles[1]]
    calls = [three.call(0, 1), three.call(1, 1), three.call(2, 1, swapped)]
    for call in calls:
        assert "was given other handles" in str(call.result())


def test_who_was_left_out_by_the_host_is_told(meeting: Callable[[int], Meeting]) -> None:
    three = meeting(3)
    left_out = three.call(2, 1)
    both = [three.call(0, 1, three.handles[:2]), three.call(1, 1, three.handles[:2])]
    assert any(each in str(left_out.result()) for each in ("not among the handles", "was already used"))
    assert [type(call.result()) for call in both] == [Invitation] * 2


def test_an_attempt_ends_when_somebody_has_gone_on_and_the_next_one_works(meeting: Callable[[int], Meeting]) -> None:
    two = meeting(2)
    later = two.call(1, 2)
    assert "host:1 does not come: it has gone on to uuid 2" in str(two.call(0, 1).result())
    assert two.call(0, 2).result() == later.result()


def test_strangers_at_the_port_do_no_harm(meeting: Callable[[int], Meeting]) -> None:
    two = meeting(2)
    handle = two.endpoints[0].handle
    with (
        socket.create_connection((handle.host, handle.port)) as silent,
        socket.create_connection((handle.host, handle.port)) as loud,
    ):
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 9000)
        calls = [two.call(0, 1), two.call(1, 1)]
        assert len({call.result() for call in calls}) == 1
        assert silent.fileno() >= 0


def test_a_process_that_is_not_named_does_not_call(meeting: Callable[[int], Meeting]) -> None:
    three = meeting(3)
    assert "host:2) is not among the 2" in str(three.call(2, 1, three.handles[:2]).result())


@pytest.mark.parametrize("host", ["10.1.2.3", "fe80::1", "a.host"])
def test_a_handle_is_what_its_text_says(host: str) -> None:
    handle = Handle("0123456789abcdef", host, 4711, "vm-1:42 é:/")
    assert Handle.parse(str(handle)) == handle


def test_lists_keep_their_order_and_sets_are_sorted() -> None:
    a, b = (str(Handle(digit * 16, "h", 1, digit)) for digit in "ab")
    assert ordered([b, a]) == [b, a]
    assert ordered({b, a}) == [a, b]
    with pytest.raises(RendezvousError, match="handles of a more than once"):
        ordered([a, b, a])
    with pytest.raises(RendezvousError, match="at least one handle"):
        ordered([])
    with pytest.raises(RendezvousError, match="is no handle of a pccl process group"):
        Handle.parse("gloo:0:-1:0:")
