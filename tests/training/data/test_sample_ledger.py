"""Reassignment of positions, and claims when a state is loaded."""

from __future__ import annotations

import pytest

from pccl.training.data.sample_ledger import Ledger, Member

BLOCK = 4


def new_ledger() -> Ledger:
    ledger = Ledger(100)
    ledger.form([Member(number, f"peer {number}", BLOCK) for number in range(2)])
    return ledger


@pytest.mark.parametrize(
    ("amounts", "is_anew"),
    [((BLOCK, 0), False), ((2 * BLOCK - 1, 0), False), ((2 * BLOCK, 0), True), ((3 * BLOCK, 2 * BLOCK), False)],
)
def test_blocks_follow_speeds_once_a_member_is_two_rounds_ahead(amounts: tuple[int, int], is_anew: bool) -> None:
    ledger = new_ledger()
    generation = ledger.generation
    ledger.claim(dict(enumerate(amounts)), 0)
    ledger.commit([0, 1])
    assert (ledger.generation > generation) is is_anew
    blocks = [amount or BLOCK for amount in amounts] if is_anew else [BLOCK] * 2
    assert [member.block for member in ledger.members] == blocks


def test_load_forgets_claims() -> None:
    other = new_ledger()
    other.claim({0: BLOCK, 1: BLOCK}, 0)
    other.commit([0, 1])
    state = other.state()
    ledger = new_ledger()
    ledger.claim({0: 1, 1: 1}, 0)
    assert ledger.claims == 1
    ledger.load(state)
    assert ledger.claims == 0
    assert ledger.state() == state
    assert ledger.lowest == 2 * BLOCK
