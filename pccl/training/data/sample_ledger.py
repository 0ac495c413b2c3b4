"""The ledger of the stream positions that a group has used, and a peer's log of its samples.

Position g of the endless stream is sample g mod N of epoch g div N. Only inputs that are equal on all peers change the
ledger:

    form     the members, to which the free positions are assigned (`pccl.training.data.stream`)
    claim    how many of its positions each member has trained on for the next average
    commit   the members in the average: their claims become used; claims of others become free

A peer missing from an average is no longer a member, and its remaining positions are reassigned to the others at once,
lowest first. If one member is two rounds ahead of another, all unclaimed positions are reassigned in blocks as
large as the most recent claims. The state lists claims in flight as free and does not name members.

`SampleLog`, which `pccl.tools.audit` reads, holds one JSON line per event:

    {"stream": {"dataset_size": 60000, "seed": 0, "shuffle": true}}         the first line of each process
    {"drawn": 7, "by": "5f...", "positions": [[96, 128]], "samples": [...]}   drawn to train on in step 7
    {"discarded": 7, "by": "5f..."}                                         samples drawn for step 7 were not trained on
    {"step": 7, "before": "9a...", "after": "c4...", "used": {"5f...": [[96, 128]]}, "again": []}   committed
"""

from __future__ import annotations

import json
import mmap
import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import blake3
from numpy.typing import NDArray

from pccl.training.data.stream import Assignment, Pool, Range, merged

GENESIS = "0" * 32


@dataclass(frozen=True, slots=True)
class Member:
    number: int
    name: str
    """The name of a peer from joining to leaving, unique over the run's lifetime."""
    block: int


@dataclass(frozen=True, slots=True)
class Commit:
    step: int
    """The number of earlier commits."""
    before: str
    after: str
    used: Mapping[str, Sequence[Range]]
    again: Sequence[Range]
    """The ranges to reassign because lost peers had claimed them."""


def history_after(before: str, step: int, used: Mapping[str, Sequence[Range]]) -> str:
    """Return the next hash of the chain, which does not depend on which members used the positions."""
    positions = merged(each for ranges in used.values() for each in ranges)
    return blake3.blake3(json.dumps([before, step, positions]).encode()).hexdigest()[: len(GENESIS)]


class Ledger:
    """The ledger; see the module docstring. Not thread-safe."""

    def __init__(self, dataset_size: int) -> None:
        self.dataset_size = dataset_size
        self.steps = 0
        self.history = GENESIS
        self.generation = 0
        self.members: tuple[Member, ...] = ()
        """The members by ascending number; empty until `form`."""
        self._pool = Pool()
        self._assignment: Assignment | None = None
        self.counts: list[int] = []
        """The number of positions that each member has claimed in this assignment."""
        self._claims: deque[dict[int, list[Range]]] = deque()
        """The claims of averages in flight, oldest first, each by member number."""

    @property
    def claims(self) -> int:
        """The number of uncommitted claims."""
        return len(self._claims)

    def index(self, number: int) -> int:
        """Return the index of a peer among the members."""
        return next(i for i, member in enumerate(self.members) if member.number == number)

    def form(self, members: Collection[Member]) -> None:
        """Form the group and drop claims in flight."""
        self._pool = self._free()
        self._claims.clear()
        self._assign(members)

    def ranges(self, index: int, begin: int, end: int) -> list[Range]:
        """Return a member's positions from number `begin` up to, but not including, `end` in this assignment."""
        assert self._assignment is not None
        return self._assignment.ranges(index, begin, end)

    def claim(self, amounts: Mapping[int, int], on_their_way: int) -> None:
        """Claim positions. `amounts` maps member numbers to counts; members that it lacks have been lost.

        If there are more claims than averages `on_their_way`, the last claim's average was never launched, and this
        claim is added to that one.
        """
        if len(self._claims) <= on_their_way:
            self._claims.append({member.number: [] for member in self.members})
        for index, member in enumerate(self.members):
            begin = self.counts[index]
            self.counts[index] += amounts.get(member.number, 0)
            self._claims[-1][member.number] += self.ranges(index, begin, self.counts[index])

    def commit(self, numbers: Collection[int]) -> Commit:
        """Commit the oldest claim with the contributions of these members."""
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
            self._assign([Member(m.number, m.name, amounts[m.number] or m.block) for m in living])
        return commit

    @property
    def lowest(self) -> int:
        """The lowest unused position; `lowest // dataset_size` epochs are complete."""
        if self._assignment is None:
            return self._pool.position(0)
        claimed = [each[0] for claim in self._claims for ranges in claim.values() for each in ranges[:1]]
        return min([self._assignment.lowest(self.counts), *claimed])

    def state(self) -> dict[str, Any]:
        """Return the state, the same on all peers, made of integers, strings and lists only."""
        pool = self._free()
        free = [list(each) for each in pool.free]
        return {"steps": self.steps, "history": self.history, "begun": pool.begun, "free": free}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state. If it differs from the ledger, remove all members. Raises KeyError, TypeError, ValueError."""
        ours = self.state()
        if {name: state[name] for name in ours} == ours:
            return
        steps, begun = int(state["steps"]), int(state["begun"])
        free = [(int(begin), int(end)) for begin, end in state["free"]]
        ends = [0, *(each for both in free for each in both), begun]
        if steps < 0 or ends != sorted(ends) or len(set(ends[1:])) != len(ends) - 1:
            raise ValueError(f"positions {free} below {begun} after {steps} steps are not the state of a sampler")
        self._pool = Pool(begun, free)
        self.steps, self.history = steps, str(state["history"])
        self._assignment, self.counts, self.members = None, [], ()
        self._claims.clear()
        self.generation += 1

    def _assign(self, members: Collection[Member]) -> None:
        self.members = tuple(sorted(members, key=lambda member: member.number))
        self._assignment = Assignment(self._pool, [member.block for member in self.members])
        self.counts = [0] * len(self.members)
        self.generation += 1

    def _rest(self) -> Pool:
        return self._pool if self._assignment is None else self._assignment.rest(self.counts)

    def _free(self) -> Pool:
        """Return the pool of unused positions, including claims in flight."""
        return self._rest().with_back(each for claim in self._claims for ranges in claim.values() for each in ranges)

    def _is_uneven(self) -> bool:
        rounds = [count // member.block for count, member in zip(self.counts, self.members, strict=True)]
        return max(rounds) >= min(rounds) + 2


def _size(ranges: Sequence[Range]) -> int:
    return sum(end - begin for begin, end in ranges)


def _drop_what_is_not_whole(file: BinaryIO) -> None:
    """Truncate an incomplete last line from a crashed process, whose samples were never handed out."""
    if os.fstat(file.fileno()).st_size:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        if end < os.fstat(file.fileno()).st_size:
            os.ftruncate(file.fileno(), end)


class SampleLog:
    """An append-only file. Each line is one write. All methods raise OSError."""

    def __init__(self, path: str | os.PathLike[str], dataset_size: int, seed: int, shuffle: bool) -> None:
        self._file: BinaryIO = Path(path).open("a+b", buffering=0)  # noqa: SIM115
        _drop_what_is_not_whole(self._file)
        self._write({"stream": {"dataset_size": dataset_size, "seed": seed, "shuffle": shuffle}})

    def drawn(self, name: str, step: int, ranges: Sequence[Range], indices: NDArray[Any]) -> None:
        self._write({"drawn": step, "by": name, "positions": ranges, "samples": indices.tolist()})

    def discarded(self, name: str, step: int) -> None:
        self._write({"discarded": step, "by": name})

    def committed(self, commit: Commit) -> None:
        links = {"step": commit.step, "before": commit.before, "after": commit.after}
        self._write({**links, "used": commit.used, "again": commit.again})

    def close(self) -> None:
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()

    def _write(self, event: dict[str, Any]) -> None:
        line = json.dumps(event, separators=(",", ":")).encode() + b"\n"
        if self._file.write(line) != len(line):
            raise OSError(f"{self._file.name}: a line was only partly written; is the disk full?")
