"""A mailbox: calls from other threads are made by its owner, whom its descriptor wakes."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator

import pytest

from pccl.runtime.data_plane.mailbox import Mailbox


@pytest.fixture
def mailbox() -> Iterator[Mailbox]:
    mailbox = Mailbox()
    yield mailbox
    mailbox.close()


def is_readable(mailbox: Mailbox, timeout_s: float = 0.0) -> bool:
    return bool(select.select([mailbox.fileno()], [], [], timeout_s)[0])


def test_calls_of_another_thread_wake_the_owner(mailbox: Mailbox) -> None:
    made: list[int] = []
    thread = threading.Thread(target=lambda: [mailbox.post(lambda n=n: made.append(n)) for n in range(3)])
    thread.start()
    assert is_readable(mailbox, 30.0)
    thread.join()
    assert made == []
    mailbox.empty()
    assert made == [0, 1, 2]
    assert not is_readable(mailbox)


def test_waking_alone_makes_it_readable(mailbox: Mailbox) -> None:
    mailbox.wake()
    assert is_readable(mailbox)
    mailbox.run_posted()
    assert is_readable(mailbox), "only emptying it takes that away"
    mailbox.empty()
    assert not is_readable(mailbox)


def test_a_call_may_post_another_one(mailbox: Mailbox) -> None:
    made: list[str] = []

    def first() -> None:
        made.append("first")
        mailbox.post(lambda: made.append("second"))

    mailbox.post(first)
    mailbox.empty()
    assert made == ["first", "second"]


def test_it_may_be_woken_without_end_and_when_closed(mailbox: Mailbox) -> None:
    for _ in range(100_000):
        mailbox.wake()
    mailbox.empty()
    assert not is_readable(mailbox)
    mailbox.close()
    mailbox.wake()
