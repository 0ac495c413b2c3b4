"""The rendezvous of a reconfigure: check-in at the store of the first handle, and its errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("torch")

from pccl.torch import bootstrap, reconfigure
from pccl.torch.reconfigure import Handle, Reconfigurer, RendezvousError, World, ordered
from tests.support.cluster import Background

LIMIT_S = 20.0


class Ranks:
    """Process group objects of this process, which call `reconfigure` at the same time."""

    def __init__(self, count: int) -> None:
        self.made = [Reconfigurer("127.0.0.1") for _ in range(count)]
        self.handles = [str(each.handle) for each in self.made]

    def call(self, rank: int, uuid: int, handles: list[str] | None = None, timeout_s: float = LIMIT_S) -> Background:
        given = self.handles if handles is None else handles

        def outcome() -> Any:
            made = self.made[rank]
            try:
                return made.enter(uuid, made.members(uuid, given), timeout_s, "a group")
            except RendezvousError as error:
                return error

        return Background(outcome)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Ranks]]:
    """Make ranks whose meeting, after the check-in, is only the store and its token."""
    monkeypatch.setenv("PCCL_ADVERTISE", "127.0.0.1")

    def meet(store: Any, names: Any, size: int, timeout_s: float, is_default: bool) -> Any:
        store.set(str(names.rank), "")
        store.wait([str(rank) for rank in range(size)])

    monkeypatch.setattr(bootstrap, "meet", meet)
    made: list[Ranks] = []

    def make(count: int) -> Ranks:
        made.append(Ranks(count))
        return made[-1]

    yield make
    for each in made:
        for reconfigurer in each.made:
            reconfigurer.close()


def test_handles_give_the_order_of_ranks(ranks: Callable[[int], Ranks]) -> None:
    three = ranks(3)
    handles = [three.handles[rank] for rank in (2, 0, 1)]
    found: list[World] = [call.result() for call in [three.call(rank, 1, handles) for rank in range(3)]]
    assert [world.rank for world in found] == [1, 2, 0]


def test_rank_without_handle_not_waited_for(ranks: Callable[[int], Ranks]) -> None:
    three = ranks(3)
    handles = three.handles[:2]
    assert [call.result().rank for call in [three.call(rank, 1, handles) for rank in range(2)]] == [0, 1]


def test_uuid_used_once_even_after_failure(ranks: Callable[[int], Ranks]) -> None:
    two = ranks(2)
    assert "reconfigure with uuid 5 timed out on rank 0" in str(two.call(0, 5, timeout_s=0.05).result())
    assert "uuid 5 was already used" in str(two.call(0, 5).result())
    assert "reconfigure with uuid 5 timed out on rank 0" in str(two.call(1, 5).result())
    assert [call.result().rank for call in [two.call(0, 6), two.call(1, 6)]] == [0, 1]


def test_missing_rank_named_on_all_ranks(ranks: Callable[[int], Ranks]) -> None:
    three = ranks(3)
    for call in [three.call(0, 1, timeout_s=0.5), three.call(1, 1)]:
        text = str(call.result())
        assert "timed out on rank 0" in text
        assert "rank 2 (" in text.split(":", 2)[2]


@pytest.mark.parametrize("dead", [0, 2])
def test_dead_rank_detected_at_once_on_all_ranks(ranks: Callable[[int], Ranks], dead: int) -> None:
    three = ranks(3)
    three.made[dead].close()
    began_s = time.monotonic()
    for call in [three.call(rank, 1) for rank in range(3) if rank != dead]:
        assert "cannot be reached" in str(call.result())
    assert time.monotonic() - began_s < LIMIT_S / 2


def test_different_handles_fail_on_all_ranks(ranks: Callable[[int], Ranks]) -> None:
    three = ranks(3)
    swapped = [three.handles[0], three.handles[2], three.handles[1]]
    for call in [three.call(0, 1), three.call(1, 1), three.call(2, 1, swapped)]:
        assert "passed different handles" in str(call.result())


def test_timeout_of_silent_store(ranks: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()

    def check_in(*_: object) -> None:
        is_over.wait(LIMIT_S)
        raise RendezvousError("the test is over")

    monkeypatch.setattr(reconfigure, "GRACE_S", 0.1)
    monkeypatch.setattr(reconfigure, "_check_in", check_in)
    assert "does not answer" in str(ranks(2).call(0, 1, timeout_s=0.1).result())
    is_over.set()


def test_process_outside_of_handles_refused(ranks: Callable[[int], Ranks]) -> None:
    three = ranks(3)
    assert "is not among the 2" in str(three.call(2, 1, three.handles[:2]).result())


@pytest.mark.parametrize("host", ["10.1.2.3", "fe80::1", "a.host"])
def test_handle_text_round_trip(host: str) -> None:
    handle = Handle("0123456789abcdef", host, 4711, "vm-1:42 é:/")
    assert Handle.parse(str(handle)) == handle


def test_handle_lists_keep_order_and_sets_are_sorted() -> None:
    a, b = (str(Handle(digit * 16, "h", 1, digit)) for digit in "ab")
    assert ordered([b, a]) == [b, a]
    assert ordered({b, a}) == [a, b]
    with pytest.raises(RendezvousError, match="handles of a more than once"):
        ordered([a, b, a])
    with pytest.raises(RendezvousError, match="at least the handle"):
        ordered([])
    with pytest.raises(RendezvousError, match="is not a handle of a pccl process group"):
        Handle.parse("gloo:0:-1:0:")


def test_meeting_that_arrives_with_the_timeout_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(Future[Any]):
        def result(self, timeout: float | None = None) -> Any:
            found = super().result()
            if timeout is not None:
                raise TimeoutError
            return found

    monkeypatch.setattr(reconfigure, "Future", Late)
    meeting: Any = object()
    assert reconfigure._bounded(0.0, lambda: meeting) is meeting
