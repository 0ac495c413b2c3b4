"""Which shared state a group adopts: a pure function of what its peers offer.

Rules, in order:

1. Peers must offer the same tensors (names, dtypes, shapes, looseness), else the call fails on all.
2. RECEIVE_ONLY offers are no candidates. Without any candidate nobody can provide the state. A peer whose content was
   being overwritten when a master was lost offers so, too, with an empty root, whatever its caller has asked for.
3. While a candidate is an incumbent (it was in the group's last sync), the revision is the highest that an incumbent
   offers: a newcomer cannot outvote incumbents by inventing a revision. It must not be below the revision of the last
   sync: an elected revision never goes back.
4. Without an incumbent candidate the newest revision offered is taken. If incumbents are still here but none may send,
   the floor of rule 3 stays; once all of them are gone the state they had is gone with them, and the run goes on from
   the best there is.
5. Among candidates at that revision the digest that most of them offer wins; a tie goes to the digest of the
   longest-accepted peer. If a SEND_ONLY peer is among them, its digest wins, because it cannot be overwritten.
6. SEND_ONLY peers with different contents, or one that would have to be overwritten, fail the call on all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pccl.protocol.messages import SyncOffer, TensorOffer
from pccl.types import Result, SharedStateSyncStrategy

RECEIVE_ONLY = SharedStateSyncStrategy.RECEIVE_ONLY.value
SEND_ONLY = SharedStateSyncStrategy.SEND_ONLY.value
LOST_NAMED_MAX = 4


@dataclass(frozen=True)
class Elected:
    """The shared state that a group adopts."""

    revision: int
    root: bytes
    donors: list[int]
    """Peers that hold the elected content and may send, longest accepted first."""
    content_receivers: frozenset[int]
    """Peers whose digest differs. They fetch the content."""
    loose_receivers: frozenset[int]
    """Peers whose revision is behind: they also take the loose tensors."""
    reason: str


@dataclass(frozen=True)
class NotElected:
    """The reason why the offers cannot be brought together."""

    code: Result
    reason: str


def elect(
    offers: Mapping[int, SyncOffer],
    incumbents: Collection[int],
    floor: int | None,
    lost: Sequence[tuple[int, str]] = (),
) -> Elected | NotElected:
    """Elect among the offers of all peers of a group, keyed by peer number (lower: longer accepted).

    `incumbents` are the peers of the group's last sync that are still in the group, `floor` is the revision it elected
    (None before the first), `lost` are the last peers that the group has lost, and why.
    """
    assert offers
    difference = _schema_difference(offers)
    if difference is not None:
        return NotElected(Result.INVALID_ARGUMENT, difference)
    # Of two that say Hello at once, the one with the higher number may be accepted first, and sync alone.
    by_age = sorted(offers.items(), key=lambda each: (each[0] not in incumbents, each[0]))
    candidates = {peer: offer for peer, offer in by_age if offer.strategy != RECEIVE_ONLY}
    if not candidates:
        return NotElected(Result.NO_SHARED_STATE_AVAILABLE, _nobody_sends(offers, lost))
    seniors = [peer for peer in candidates if peer in incumbents]
    voters = seniors or list(candidates)
    revision = max(candidates[peer].revision for peer in voters)
    if floor is not None and revision < floor and any(peer in incumbents for peer in offers):
        newest = next(peer for peer in voters if candidates[peer].revision == revision)
        return NotElected(
            Result.NO_SHARED_STATE_AVAILABLE,
            f"the group has already agreed on revision {floor}, and the newest that may be sent now is {revision}, "
            f"of peer {newest}; a revision must never be lowered",
        )
    at_revision = [peer for peer, offer in candidates.items() if offer.revision == revision]
    protected = [peer for peer, offer in candidates.items() if offer.strategy == SEND_ONLY]
    conflict = _send_only_conflict(candidates, protected, revision)
    if conflict is not None:
        return NotElected(Result.INVALID_USAGE, conflict)
    if protected:
        root = candidates[protected[0]].root
        reason = f"peer {protected[0]} is SEND_ONLY"
    else:
        votes = Counter(candidates[peer].root for peer in at_revision)
        most = max(votes.values())
        root = next(candidates[peer].root for peer in at_revision if votes[candidates[peer].root] == most)
        reason = f"{most} of {len(at_revision)} at revision {revision}"
    return Elected(
        revision=revision,
        root=root,
        donors=[peer for peer in at_revision if candidates[peer].root == root],
        content_receivers=frozenset(peer for peer, offer in offers.items() if offer.root != root),
        loose_receivers=frozenset(peer for peer, offer in offers.items() if offer.revision < revision),
        reason=reason,
    )


def _nobody_sends(offers: Mapping[int, SyncOffer], lost: Sequence[tuple[int, str]]) -> str:
    overwritten = sorted(peer for peer, offer in offers.items() if not offer.root)
    if not overwritten:
        return "all peers called with RECEIVE_ONLY; at least one must be able to send"
    gone = "; ".join(f"peer {peer} is lost: {reason}" for peer, reason in lost[-LOST_NAMED_MAX:])
    return (
        f"nobody is left who could send the state: the contents of peers {overwritten} were being overwritten when "
        f"those who sent it were lost{f' ({gone})' if gone else ''}; load it anew on one of them, and call again"
    )


def _send_only_conflict(candidates: Mapping[int, SyncOffer], protected: list[int], revision: int) -> str | None:
    """Return why the offers of SEND_ONLY peers cannot be kept, or None."""
    for peer in protected[1:]:
        a, b = candidates[protected[0]], candidates[peer]
        if a.root != b.root or a.revision != b.revision:
            return (
                f"peers {protected[0]} and {peer} are both SEND_ONLY but hold different contents (revisions "
                f"{a.revision} and {b.revision}); neither may be overwritten"
            )
    if protected and candidates[protected[0]].revision != revision:
        return (
            f"peer {protected[0]} is SEND_ONLY at revision {candidates[protected[0]].revision}, but the group is at "
            f"revision {revision} and would have to overwrite it"
        )
    return None


def _schema_difference(offers: Mapping[int, SyncOffer]) -> str | None:
    """Return how the tensors of two offers differ, or None if all offer the same."""
    first, *others = sorted(offers)
    schema = offers[first].tensors
    for peer in others:
        other = offers[peer].tensors
        if other == schema:
            continue
        for mine, theirs in zip(schema, other, strict=False):
            if mine != theirs:
                return (
                    f"peer {first} offers {describe(mine)} where peer {peer} offers {describe(theirs)}; all peers must "
                    f"list the same tensors in the same order"
                )
        return (
            f"peer {first} offers {len(schema)} tensors and peer {peer} offers {len(other)}; all peers must list the "
            f"same tensors in the same order"
        )
    return None


def describe(tensor: TensorOffer) -> str:
    loose = ", content may differ" if tensor.loose else ""
    return f"{tensor.name!r} ({tensor.dtype} {list(tensor.shape)}{loose})"
