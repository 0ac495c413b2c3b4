"""Connections of links that stand, dialled by a network that is made up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio
import trio.testing

from pccl.logs import AboutLogger
from pccl.protocol import messages as m
from pccl.protocol.peer import effects as ps
from pccl.runtime.network import links
from pccl.runtime.session.driver import SessionOptions
from pccl.runtime.session.links import REDIAL_S, REDIAL_S_MAX, Outbound
from pccl.runtime.session.reports import WorkCounters

NOBODY = cast(Any, None)
LINK = 5
MEMBER = m.PeerInfo(2, 0, ["127.0.0.1"], 1, 1)


class Played:
    """A session with one link, and the times at which its connections were dialled."""

    def __init__(self, nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dialled_s: list[float] = []
        self.taken: list[int] = []
        self.answers: Callable[[], bool] = lambda: False
        self.counters = WorkCounters()
        shared: Any = SimpleNamespace(
            options=SessionOptions(0, 1),
            logger=AboutLogger(logging.getLogger("pccl.peer"), dict),
            master=SimpleNamespace(host=""),
            listen_port=1,
            engine=SimpleNamespace(link_close=lambda link: None),
            lifetime=SimpleNamespace(spawn=lambda function, *arguments: nursery.start_soon(function, *arguments)),
            driver=SimpleNamespace(facts=SimpleNamespace(run="run", peer=1)),
            counters=self.counters,
        )
        self.outbound = Outbound(shared)
        self.outbound._making[LINK] = []
        monkeypatch.setattr(links, "dial_within", self._dial)
        monkeypatch.setattr(self.outbound, "take_connection", lambda link, index, sock, keys: self.taken.append(index))

    async def _dial(self, *_: object) -> tuple[object, None]:
        self.dialled_s.append(trio.current_time())
        if not self.answers():
            raise links.LinkError("nobody answers")
        return object(), None

    def carry_out(self, effect: object) -> None:
        self.outbound.handlers[type(effect)](NOBODY, effect)

    def add(self, index: int, is_replacement: bool) -> None:
        self.carry_out(ps.AddConnections(LINK, MEMBER, 1, range(index, index + 1), is_replacement, 1.0))


def play(run: Callable[[Played], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            await run(Played(nursery, monkeypatch))
            nursery.cancel_scope.cancel()

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


@pytest.mark.parametrize("is_replacement", [True, False])
def test_a_lost_connection_is_tried_again_and_a_further_one_is_not(
    is_replacement: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(played: Played) -> None:
        played.answers = lambda: len(played.dialled_s) == 8
        begun_s = trio.current_time()
        played.add(3, is_replacement)
        await trio.sleep(1000)
        pauses = [0.0, *(min(REDIAL_S * 2**n, REDIAL_S_MAX) for n in range(7))] if is_replacement else [0.0]
        assert played.dialled_s == pytest.approx([begun_s + sum(pauses[: n + 1]) for n in range(len(pauses))])
        assert played.taken == ([3] if is_replacement else [])

    play(run, monkeypatch)


def test_a_link_that_is_closed_is_dialled_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(played: Played) -> None:
        played.add(3, is_replacement=True)
        await trio.sleep(REDIAL_S / 2)
        played.carry_out(ps.CloseLink(LINK))
        await trio.sleep(1000)
        assert len(played.dialled_s) == 1
        assert played.outbound.links_made == 0

    play(run, monkeypatch)
