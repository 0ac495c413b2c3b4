"""Quorum that is kept as each summary comes, beside one that is worked out of all of them anew."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol import messages as m
from pccl.protocol.failover.durable_state import majority
from pccl.protocol.failover.recovery import is_sound, quorum_of
from pccl.protocol.summary_tally import VIEWS_MAX, Summary, SummaryTally, Views
from tests.protocol.test_recovery_report import prepared, report_of, view


def peers_of(rings: list[m.Ring]) -> frozenset[int]:
    return frozenset(peer for ring in rings for peer in ring.peers)


def answered(summary: Summary) -> set[int]:
    views = [*summary.answered, *([summary.prepared] if summary.prepared is not None else [])]
    return {each.view for each in views if each.answered}


def naive(summaries: dict[int, Summary], has_rivals: bool) -> tuple[Any, ...]:
    """View, its peers, quorum_views views, who can go on, whether a majority has come, and all."""
    heard = frozenset(summaries)
    views = [each.installed for each in summaries.values() if each.installed is not None]
    installed = max(views, key=lambda view: view.view, default=None)
    if installed is None:
        return 0, frozenset(), {}, frozenset(), False, False
    peers = expected = peers_of(installed.rings)
    told = [said for each in summaries.values() for said in (each.prepared, *each.answered) if said is not None]
    quorum_views = {installed.view: peers}
    for number, rings in {said.view: said.rings for said in told if said.view > installed.view}.items():
        listed = peers_of(rings)
        if all(number in answered(each) for peer, each in summaries.items() if peer in listed) and not listed <= heard:
            quorum_views[number] = listed
    settled_by = [
        each.prepared
        for peer, each in summaries.items()
        if peer in peers and each.has_decided and each.prepared is not None and each.prepared.view > installed.view
    ]
    for listed in quorum_views.values():
        expected &= listed
    if settled_by:
        expected &= peers_of(max(settled_by, key=lambda view: view.view).rings)
    members = expected & heard
    has_majority = bool(members) and all(
        len(listed & heard) >= majority(len(listed))
        and not (has_rivals and len(listed - members) >= majority(len(listed)))
        for listed in quorum_views.values()
    )
    return installed.view, peers, quorum_views, expected, has_majority, has_majority and expected <= heard


RINGS = {number: tuple(peer for peer in range(1, 8) if (peer * 7 + number * 3) % 5) for number in range(1, 6)}
"""Rings of each view."""


@st.composite
def summaries(draw: st.DrawFn) -> Summary:
    peer = draw(st.integers(1, 7))
    number = draw(st.sampled_from([0, 1, 2, 3]))
    installed = view(number, *RINGS[number]) if number else None
    newer = sorted(draw(st.sets(st.integers(number + 1, 5), max_size=2)))
    told = [prepared(each, *RINGS[each], answered=draw(st.booleans())) for each in newer]
    found: m.RecoveryReport = report_of(peer, installed, told.pop() if told else None, answered=told)
    is_whole = draw(st.booleans())
    return found if is_whole else m.PreVote(found.installed, found.prepared, found.has_decided, found.answered)


@given(st.lists(st.tuples(st.integers(1, 7), st.none() | summaries()), max_size=25), st.booleans())
def test_it_stands_as_if_all_were_looked_at_anew(events: list[tuple[int, Summary | None]], has_rivals: bool) -> None:
    """Whoever comes, says something else, or goes."""
    tally: SummaryTally[Summary] = SummaryTally()
    model: dict[int, Summary] = {}
    for peer, summary in events:
        if summary is None:
            tally.discard(peer)
            model.pop(peer, None)
        else:
            tally.add(peer, tally.views.shared(summary))
            model.pop(peer, None)
            model[peer] = summary
        found = quorum_of(tally, has_rivals)
        assert (
            found.view,
            found.peers,
            found.quorum_views,
            found.expected,
            found.has_majority,
            found.is_complete,
        ) == naive(model, has_rivals)
        assert found.here == len(found.peers & model.keys())
        assert quorum_of(model, has_rivals) == found
        assert tally.summaries == model


def test_rings_that_many_tell_of_are_kept_once() -> None:
    views = Views()
    told = [views.shared(report_of(peer, view(7, 1, 2, 3), prepared(8, 1, 2, 3))) for peer in (1, 2, 3)]
    assert len({id(each.installed.rings) for each in told}) == 1
    assert len({id(each.prepared.rings) for each in told}) == 1
    assert told[1] == report_of(2, view(7, 1, 2, 3), prepared(8, 1, 2, 3))


def test_made_up_views_are_not_kept_for_ever() -> None:
    views = Views()
    for number in range(10 * VIEWS_MAX):
        views.of(view(number // 2, number + 1))
    assert sum(map(len, views._known.values())) == VIEWS_MAX
    for number in range(10 * VIEWS_MAX):
        assert views.of(view(number // 2, number + 1)).peers == {number + 1}


def test_who_makes_rings_up_does_not_speak_for_others() -> None:
    views = Views()
    assert is_sound(1, report_of(1, view(7, 1)), views)
    assert is_sound(2, report_of(2, view(7, 1, 2, 3)), views)
    assert not is_sound(2, report_of(2, view(7, 1)), views)
    assert not is_sound(2, report_of(2, view(8, 2, 0)), views)
