"""Every rule of the shared-state election, by example and by property."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.master.group_calls import Elected, NotElected, elect
from pccl.protocol.messages import SyncOffer, TensorOffer
from pccl.types import Result, SharedStateSyncStrategy

POPULAR = SharedStateSyncStrategy.ENFORCE_POPULAR.value
RECEIVE = SharedStateSyncStrategy.RECEIVE_ONLY.value
SEND = SharedStateSyncStrategy.SEND_ONLY.value
WEIGHTS = TensorOffer("weights", "FLOAT", [4], False)


def offer(
    revision: int, content: str = "x", strategy: str = POPULAR, tensors: list[TensorOffer] | None = None
) -> SyncOffer:
    return SyncOffer(strategy, revision, content.encode(), [WEIGHTS] if tensors is None else tensors)


def elected(result: Elected | NotElected) -> Elected:
    assert isinstance(result, Elected), result
    return result


def refused(result: Elected | NotElected) -> NotElected:
    assert isinstance(result, NotElected), result
    return result


def test_newcomer_cannot_invent_revision() -> None:
    result = elected(elect({1: offer(5), 2: offer(5), 3: offer(99, "new")}, {1, 2}, 5))
    assert (result.revision, result.donors) == (5, [1, 2])
    assert result.content_receivers == {3}
    assert result.loose_receivers == set()


def test_newest_incumbent_wins() -> None:
    result = elected(elect({1: offer(7, "new"), 2: offer(6), 3: offer(6)}, {1, 2, 3}, 6))
    assert (result.revision, result.root, result.donors) == (7, b"new", [1])
    assert result.content_receivers == result.loose_receivers == {2, 3}


def test_revision_never_decreases() -> None:
    result = refused(elect({1: offer(4), 2: offer(4)}, {1, 2}, 5))
    assert result.code is Result.NO_SHARED_STATE_AVAILABLE
    assert "revision 5" in result.reason
    assert "4" in result.reason


def test_receiving_incumbents_keep_floor() -> None:
    result = refused(elect({1: offer(9, strategy=RECEIVE), 2: offer(3)}, {1}, 9))
    assert result.code is Result.NO_SHARED_STATE_AVAILABLE


def test_newest_offer_wins_without_incumbents() -> None:
    result = elected(elect({4: offer(2), 5: offer(3, "newer")}, set(), 50))
    assert (result.revision, result.root) == (3, b"newer")


def test_most_frequent_content_wins() -> None:
    assert elected(elect({1: offer(1, "a"), 2: offer(1, "b"), 3: offer(1, "b")}, set(), None)).root == b"b"
    assert elected(elect({2: offer(1, "b"), 1: offer(1, "a")}, set(), None)).root == b"a"


def test_incumbent_wins_tie() -> None:
    offers = {1: offer(0, "a"), 2: offer(0, "b")}
    assert elected(elect(offers, incumbents={2}, floor=0)).root == b"b"


def test_receivers_never_vote_or_send() -> None:
    offers = {1: offer(1, "a"), 2: offer(9, "b", RECEIVE), 3: offer(9, "b", RECEIVE)}
    result = elected(elect(offers, set(), None))
    assert (result.revision, result.root, result.donors) == (1, b"a", [1])
    assert result.content_receivers == {2, 3}


def test_sender_beats_majority() -> None:
    offers = {1: offer(1, "a"), 2: offer(1, "a"), 3: offer(1, "b", SEND)}
    result = elected(elect(offers, set(), None))
    assert (result.root, result.donors, result.content_receivers) == (b"b", [3], {1, 2})


def test_different_senders_are_an_error() -> None:
    result = refused(elect({1: offer(1, "a", SEND), 2: offer(1, "b", SEND)}, set(), None))
    assert result.code is Result.INVALID_USAGE
    assert "1 and 2" in result.reason


def test_overwritten_sender_is_an_error() -> None:
    result = refused(elect({1: offer(8), 2: offer(2, "old", SEND)}, {1}, 8))
    assert result.code is Result.INVALID_USAGE
    assert "peer 2" in result.reason


def test_different_tensors_are_named() -> None:
    other = TensorOffer("weights", "DOUBLE", [4], False)
    result = refused(elect({1: offer(1), 2: offer(1, tensors=[other])}, set(), None))
    assert result.code is Result.INVALID_ARGUMENT
    assert "FLOAT" in result.reason
    assert "DOUBLE" in result.reason
    more = refused(elect({1: offer(1), 2: offer(1, tensors=[WEIGHTS, other])}, set(), None))
    assert "1 tensors" in more.reason
    assert "2" in more.reason


offers = st.dictionaries(
    st.integers(1, 6),
    st.builds(offer, st.integers(0, 4), st.sampled_from("ab"), st.sampled_from([POPULAR, RECEIVE, SEND])),
    min_size=1,
)


@given(offers, st.sets(st.integers(1, 6)), st.none() | st.integers(0, 4))
def test_elections_obey_rules(given_offers: dict[int, SyncOffer], incumbents: set[int], floor: int | None) -> None:
    present = incumbents.intersection(given_offers)
    result = elect(given_offers, present, floor)
    if isinstance(result, NotElected):
        assert result.reason
        assert result.code is not Result.SUCCESS
        return
    assert result.donors
    for peer in result.donors:
        chosen = given_offers[peer]
        assert (chosen.revision, chosen.root) == (result.revision, result.root)
        assert chosen.strategy != RECEIVE
    for peer, each in given_offers.items():
        assert (peer in result.content_receivers) == (each.root != result.root)
        assert (peer in result.loose_receivers) == (each.revision < result.revision)
        if each.strategy == SEND:
            assert peer in result.donors
    if floor is not None and present:
        assert result.revision >= floor
    seniors = [given_offers[peer].revision for peer in present if given_offers[peer].strategy != RECEIVE]
    if seniors:
        assert result.revision == max(seniors)
