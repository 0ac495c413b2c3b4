"""The account of what a group has used of a data stream: the part of `ElasticSampler` that is the same on all peers.

Theory of operation. The stream is endless: its position g is sample g mod N of epoch g div N. The ledger knows which
positions are used, and who may use which of the others next. Three things change it, each by what all peers have alike:

    form     who is there: the free positions are dealt out anew (`pccl.training.data.deal`)
    claim    how many of its positions each member has trained on for the step that is to be averaged next
    commit   whose contributions the average had: their claims are used; claims of others are free again

1. *A position is used once.* Members' positions are disjoint, and each uses its own in order: a claim is the next so
   many. Only free positions are dealt out, and a claimed one is free again only if its average was made without it.
2. *No position is lost.* What is neither used nor claimed is in the deal. Whoever is missing from an average is no
   member from then on; what remained of its share is dealt out among the others at once, the lowest positions first.
3. *The state is small.* Members that use their blocks alike leave no holes; where one is two rounds ahead of another
   the rest is dealt anew, in blocks as large as their last claims, so that shares follow speeds. In the state there
   are the first position that nobody has begun, and ranges below it: about one for each block that somebody is behind.
4. *The state is committed or nothing.* In it, claims whose average is on its way are free, and it names no members: who
   takes it up, from a peer or from a file, forms a group anew.

`history` is a hash chain over the commits. Two peers with one history have used the same samples in the same steps;
and of the steps in the logs of a run it tells those that led to a given state (`pccl.tools.audit`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import blake3

from pccl.training.data.deal import Deal, Pool, Range, merged

GENESIS = "0" * 32


@dataclass(frozen=True, slots=True)
class Member:
    number: int
    """The peer's, by which averages know it."""
    name: str
    """The name of a peer's time in the run: no two peers that ever were have the same."""
    block: int
    """Positions that it is dealt at a time."""


@dataclass(frozen=True, slots=True)
class Commit:
    step: int
    """Commits before it."""
    before: str
    after: str
    """The histories."""
    used: Mapping[str, Sequence[Range]]
    """The ranges that were used, by members' names."""
    again: Sequence[Range]
    """The ranges to be given out again, as a lost peer had claimed them."""


def history_after(before: str, step: int, used: Mapping[str, Sequence[Range]]) -> str:
    """The next link of the chain; by whom a position was used makes no difference."""
    positions = merged(each for ranges in used.values() for each in ranges)
    return blake3.blake3(json.dumps([before, step, positions]).encode()).hexdigest()[: len(GENESIS)]


class Ledger:
    """See the module for what it does. Not thread-safe."""

    def __init__(self, dataset_size: int) -> None:
        self.dataset_size = dataset_size
        self.steps = 0
        """Commits so far, of the whole run."""
        self.history = GENESIS
        self.generation = 0
        """Counts the deals: positions that a member foresaw in an earlier one are not its own any more."""
        self.members: tuple[Member, ...] = ()
        """The members by ascending number; empty until `form`."""
        self._pool = Pool()
        self._deal: Deal | None = None
        self._counts: list[int] = []
        """The count of each member's positions in this deal that are claimed."""
        self._claims: deque[dict[int, list[Range]]] = deque()
        """The claims of averages on their way, by members' numbers, oldest first."""

    @property
    def claims(self) -> int:
        """The number of claims that have not been committed."""
        return len(self._claims)

    def index(self, number: int) -> int:
        """Which member that peer is."""
        return next(i for i, member in enumerate(self.members) if member.number == number)

    def form(self, members: Collection[Member]) -> None:
        """The group from here on; claims of averages on their way are forgotten."""
        self._pool = self._free()
        self._claims.clear()
        self._deal_out(members)

    def claimed(self, index: int) -> int:
        """Return how many of a member's positions in this deal are claimed."""
        return self._counts[index]

    def ranges(self, index: int, begin: int, end: int) -> list[Range]:
        """A member's positions number `begin` to before `end` in this deal."""
        assert self._deal is not None
        return self._deal.ranges(index, begin, end)

    def claim(self, amounts: Mapping[int, int], on_their_way: int) -> None:
        """Claim so many positions for each member with these numbers, which has trained on them; other members have
        been lost. Where there are more claims than averages `on_their_way`, the average of the last claim was never
        launched: this claim is added to it."""
        if len(self._claims) <= on_their_way:
            self._claims.append({member.number: [] for member in self.members})
        for index, member in enumerate(self.members):
            begin = self._counts[index]
            self._counts[index] += amounts.get(member.number, 0)
            self._claims[-1][member.number] += self.ranges(index, begin, self._counts[index])

    def commit(self, numbers: Collection[int]) -> Commit:
        """The oldest claim's average had the contributions of these members."""
        claim = self._claims.popleft()
        living = [member for member in self.members if member.number in numbers]
        used = {member.name: tuple(claim[member.number]) for member in living}
        lost = claim.keys() - {member.number for member in living}
        again = [each for number in lost for each in claim[number]]
        commit = Commit(self.steps, self.history, history_after(self.history, self.steps, used), used, again)
        self.steps += 1
        self.history = commit.after
        if lost or self._is_uneven():
            for later in self._claims:
                again += [each for number in lost for each in later.pop(number, ())]
            self._pool = self._rest().with_back(again)
            amounts = {number: _size(ranges) for number, ranges in claim.items()}
            self._deal_out([Member(m.number, m.name, self._block_of(m, amounts[m.number])) for m in living])
        return commit

    @property
    def lowest(self) -> int:
        """The lowest position that is not used: `lowest // dataset_size` epochs are complete."""
        if self._deal is None:
            return self._pool.position(0)
        claimed = [each[0] for claim in self._claims for ranges in claim.values() for each in ranges[:1]]
        return min([self._deal.lowest(self._counts), *claimed])

    def state(self) -> dict[str, Any]:
        """Return the state that is the same on all peers, in integers, strings and lists alone."""
        pool = self._free()
        free = [list(each) for each in pool.free]
        return {"steps": self.steps, "history": self.history, "begun": pool.begun, "free": free}

    def load(self, state: Mapping[str, Any]) -> None:
        """Takes up `state`, and has no members then unless it has it already. KeyError, TypeError or ValueError for
        what is no state."""
        ours = self.state()
        if {name: state[name] for name in ours} == ours:
            return
        steps, begun = int(state["steps"]), int(state["begun"])
        free = [(int(begin), int(end)) for begin, end in state["free"]]
        ends = [0, *(each for both in free for each in both), begun]
        if steps < 0 or ends != sorted(ends) or len(set(ends[1:])) != len(ends) - 1:
            raise ValueError(f"positions {free} below {begun} after {steps} steps are no state of a sampler")
        self._pool = Pool(begun, free)
        self.steps, self.history = steps, str(state["history"])
        self._deal, self._counts, self.members = None, [], ()
        self._claims.clear()
        self.generation += 1

    def _deal_out(self, members: Collection[Member]) -> None:
        self.members = tuple(sorted(members, key=lambda member: member.number))
        self._deal = Deal(self._pool, [member.block for member in self.members])
        self._counts = [0] * len(self.members)
        self.generation += 1

    def _rest(self) -> Pool:
        """Return the pool of positions that nobody has claimed."""
        return self._pool if self._deal is None else self._deal.rest(self._counts)

    def _free(self) -> Pool:
        """Return the pool of positions that are not used: also those that averages on their way have claimed."""
        return self._rest().with_back(each for claim in self._claims for ranges in claim.values() for each in ranges)

    def _is_uneven(self) -> bool:
        rounds = [count // member.block for count, member in zip(self._counts, self.members, strict=True)]
        return max(rounds) >= min(rounds) + 2

    def _block_of(self, member: Member, amount: int) -> int:
        """Return how many positions at a time a member is dealt that has claimed so many for a step."""
        return amount or member.block


def _size(ranges: Sequence[Range]) -> int:
    return sum(end - begin for begin, end in ranges)
