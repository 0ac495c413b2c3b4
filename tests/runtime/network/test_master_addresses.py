"""The order in which masters are asked, and how long each is waited for."""

from __future__ import annotations

import pytest

from pccl.runtime.network.addresses import PAUSE_S_MAX, MasterAddresses, parse_masters


def test_all_in_turn_from_the_first_on() -> None:
    masters = MasterAddresses(parse_masters("a:1, b:2,a:1"))
    assert [masters.next(0.5).address for _ in range(5)] == [("a", 1), ("b", 2), ("a", 1), ("b", 2), ("a", 1)]


def test_pauses_come_between_rounds_and_stay_short() -> None:
    masters = MasterAddresses([("a", 1), ("b", 2)])
    pauses = [masters.next(0.999).pause_s for _ in range(40)]
    assert pauses[0] == 0
    assert set(pauses[1::2]) == {0}
    assert pauses[2::2] == sorted(pauses[2::2])
    assert 0 < pauses[2] < 0.06
    assert PAUSE_S_MAX * 0.9 < pauses[-2] <= PAUSE_S_MAX


def test_chance_spreads_peers() -> None:
    def second(chance: float) -> float:
        masters = MasterAddresses([("a", 1)])
        masters.next(chance)
        return masters.next(chance).pause_s

    assert second(0.0) < second(0.5) < second(0.99)


def test_a_search_has_the_same_order_whatever_the_order_given() -> None:
    one, other = MasterAddresses([("b", 2), ("a", 10), ("a", 9)]), MasterAddresses([("a", 10), ("a", 9), ("b", 2)])
    one.next(0.5)
    searches = one.restarted(), other.restarted()
    assert not searches[0].are_all_asked
    orders = [[search.next(0.5).address for _ in range(3)] for search in searches]
    assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(one.addresses)


def test_one_stays_at_the_first_that_gathers_and_looks_at_the_others() -> None:
    masters = MasterAddresses([("a", 1), ("b", 2), ("c", 3)])
    for _ in range(2):
        masters.next(0.5)  # is dead
        masters.next(0.5)
        first = masters.patience_s(5.0, is_majority_there=False)
        masters.next(0.5)
        other = masters.patience_s(5.0, is_majority_there=False)
        assert 0 < 5 * other < first < first + other < 5.0
    assert masters.patience_s(5.0, is_majority_there=True) > 1.5 * 5.0
    assert MasterAddresses([("a", 1)]).patience_s(5.0, is_majority_there=False) == float("inf")


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("timeout_s", [0.1, 0.5, 1.0, 2.0, 5.0, 60.0])
def test_a_round_takes_no_longer_than_a_majority_waits_for_the_rest(timeout_s: float, count: int) -> None:
    masters = MasterAddresses([("a", port) for port in range(count)])
    for _ in range(8):
        pauses, waits = [], []
        for _ in range(count):
            pauses.append(masters.next(0.999).pause_s)
            waits.append(masters.patience_s(timeout_s, is_majority_there=False))
        assert sum(waits) < timeout_s
        assert timeout_s < 0.5 or sum(pauses + waits) <= timeout_s
        assert waits[0] > timeout_s / 2
    for _ in range(count):
        masters.next(0.999)  # none of them gathers peers any more
    assert masters.next(0.999).pause_s > PAUSE_S_MAX * 0.9


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_refusal_counts_once_all_others_were_asked_or_are_none(count: int) -> None:
    masters = MasterAddresses([("a", port) for port in range(count)])
    for _ in range(count):
        masters.next(0.5)
        assert masters.are_all_asked_again == (count == 1)
    masters.next(0.5)
    assert masters.are_all_asked_again


def test_the_account_has_the_last_failure_of_each() -> None:
    masters = MasterAddresses([("a", 1), ("b", 2), ("c", 3)])
    masters.failed(("b", 2), "refused")
    masters.failed(("a", 1), "no answer")
    masters.failed(("b", 2), "a standby")
    assert masters.failures() == "a:1: no answer; b:2: a standby"


def test_asked_once_each() -> None:
    masters = MasterAddresses([("a", 1), ("b", 2)])
    assert not masters.are_all_asked
    masters.next(0)
    assert not masters.are_all_asked
    masters.next(0)
    assert masters.are_all_asked
