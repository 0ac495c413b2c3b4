"""The life of one op: which of its states may follow on which."""

from __future__ import annotations

import pytest

from pccl.protocol.peer.ops import IS_DONE, MAY_BE_DONE, TRANSITIONS, UNDECIDED, Op, OpState


def test_every_state_reachable_and_ends() -> None:
    assert set(TRANSITIONS) == set(OpState)
    reached, ending = {OpState.QUEUED}, {OpState.ENDED}
    for _ in OpState:
        reached |= {state for before in reached for state in TRANSITIONS[before]}
        ending |= {state for state, after in TRANSITIONS.items() if after & ending}
    assert reached == ending == set(OpState)


def test_transitions_have_no_cycles() -> None:
    """No op is in one state twice: the table has no circle."""
    order: list[OpState] = []
    while len(order) < len(OpState):
        order.append(next(state for state in OpState if state not in order and TRANSITIONS[state] <= set(order)))
    assert order[-1] is OpState.QUEUED


def test_decided_stays_decided() -> None:
    for state in set(OpState) - UNDECIDED - {OpState.QUEUED}:
        assert not TRANSITIONS[state] & UNDECIDED
    assert IS_DONE < MAY_BE_DONE < UNDECIDED
    for state in UNDECIDED - MAY_BE_DONE:
        assert not TRANSITIONS[state] & MAY_BE_DONE, "what the engine has stopped or refused is never done"


@pytest.mark.parametrize("state", [OpState.DONE, OpState.HELD])
def test_illegal_transition_asserts(state: OpState) -> None:
    op = Op(1, 7, 0.0)
    with pytest.raises(AssertionError, match=f"op 1 with tag 7: OpState.QUEUED to {state}"):
        op.move(state)
    op.move(OpState.RUNNING)
    op.move(OpState.ENDING)
    assert op.state is OpState.ENDING
