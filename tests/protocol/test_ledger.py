"""The ledger beside a naive model that remembers everything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pccl.protocol.master.run_state import Ledger
from pccl.protocol.messages import OpRef

RING = (1, 2, 3)
TAGS = (0, 1)


class LedgerBesideModel(RuleBasedStateMachine):
    """Each peer uses a tag again only after the verdict on its last use, as real peers do."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(RING)
        self.verdicts: dict[OpRef, str] = {}
        self.done: dict[OpRef, set[int]] = {}

    def current(self, tag: int) -> OpRef:
        return OpRef(tag, sum(op.tag == tag for op in self.verdicts))

    @rule(peer=st.sampled_from(RING), tags=st.sets(st.sampled_from(TAGS)))
    def a_peer_is_done(self, peer: int, tags: set[int]) -> None:
        ops = [self.current(tag) for tag in sorted(tags)]
        expected = []
        for op in ops:
            self.done.setdefault(op, set()).add(peer)
            if self.done[op] == set(RING):
                self.verdicts[op] = "commit"
                expected.append(op)
        assert self.ledger.done(peer, ops) == expected

    @rule(peer=st.sampled_from(RING), tag=st.sampled_from(TAGS))
    def a_late_word_on_a_decided_op_changes_nothing(self, peer: int, tag: int) -> None:
        decided = [op for op in self.verdicts if op.tag == tag]
        if decided:
            assert self.ledger.done(peer, [decided[-1]]) == []
            assert not self.ledger.decide(decided[-1])
            self.ledger.stall(peer, [decided[-1]])

    @rule(tag=st.sampled_from(TAGS))
    def an_op_is_aborted(self, tag: int) -> None:
        op = self.current(tag)
        assert self.ledger.decide(op)
        self.verdicts[op] = "abort"

    @rule(peer=st.sampled_from(RING), tag=st.sampled_from(TAGS))
    def a_peer_stalls(self, peer: int, tag: int) -> None:
        self.ledger.stall(peer, [self.current(tag)])
        assert peer in self.ledger.stalled[self.current(tag)]

    @invariant()
    def only_undecided_ops_are_in_the_book(self) -> None:
        assert not set(self.ledger.stalled).intersection(self.verdicts)
        undecided = {op: peers for op, peers in self.done.items() if op not in self.verdicts}
        assert self.ledger.undecided == len(undecided)
        for op, peers in undecided.items():
            assert set(self.ledger.missing(op, 0)[1]) == set(RING) - peers

    @rule(survivors=st.sets(st.sampled_from(RING), min_size=1))
    def a_flush_commits_what_all_survivors_have(self, survivors: set[int]) -> None:
        expected = {op for op, peers in self.done.items() if op not in self.verdicts and survivors <= peers}
        assert set(self.ledger.settle(survivors)) == expected
        assert self.ledger.undecided == 0
        self.__init__()  # type: ignore[misc]


TestLedgerBesideModel = LedgerBesideModel.TestCase


@given(st.integers(0, 50))
def test_verdict_memory_is_bounded(extra: int) -> None:
    from pccl.protocol.master import run_state as ledger

    book = Ledger((1,))
    for tag in range(extra + 3):
        book.done(1, [OpRef(tag, 0)])
    assert len(book._decided) <= ledger.DECIDED_TAGS_MAX
