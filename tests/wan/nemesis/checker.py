"""Judges what peers report against what the library promises. Shares no code with pccl, and trusts no report of it.

Theory of operation. An op is named by (label, step, tag): the label of the state that it leads on from, the step that
its callers counted, and its tag. A peer that takes part in it reports each attempt: when it was launched, and how it
ended. These must hold, whatever was done to the network, the processes and the disks:

1. *One verdict.* All that report that an op was committed name the same participants, are among them, and have the same
   bytes. A participant whose last attempt ended with a definite abort contradicts them; one whose attempt has no end,
   or ended with an error that says that the outcome is unknown to it or that its session is over, does not.
2. *Linear in real time.* No op is committed anywhere before the last of its participants has launched it, nor by one
   that did not launch it. An attempt that was aborted is not a launch.
3. *The right numbers.* The result is what the contributions of the participants give, which are computed here again
   from seeds; of quantized ops and averages, as near as documented.
4. *Inputs* are as they were after every error, and after a commit wherever the result went elsewhere; and
   arrays that an error has given back stay unchanged.
5. *In order.* A peer's ops with one tag are committed at growing steps, as long as its state has one label. All that
   it has launched in a step have ended when it goes on to the next.
6. *One state.* All that have a revision of a label have the same chain of digests, and the chain follows from the ops
   that were committed: all of them, and no others. No peer skips a revision, or syncs to one that no peer has had. The
   bulk that was copied along is the same wherever it was looked at. Training classes have the same digest at the same
   revision.
7. *No unexpected error is raised*, and no peer that was asked to leave fails to.
8. *Flat.* A peer that lives long needs no more memory, descriptors and threads later than before.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.wan.nemesis import values
from tests.wan.nemesis.history import Event
from tests.wan.nemesis.values import Load, Op

COMMITTED = "committed"
INDEFINITE = frozenset({"OUTCOME_UNKNOWN", "MASTER_CONNECTION_FAILED", "RANK_CONNECTION_FAILED", "NOT_INITIALIZED"})
"""Errors that leave open whether the others have committed the op: this peer's session is over, or it says so."""
FLAT_AFTER_S = 30.0
"""The time that a peer has for filling its pools and caches."""
FLAT_FOR_S = 60.0
"""The least time that it is watched after that."""
FLAT_SHARE = 0.05
FLAT_COUNT = 2
"""Descriptors and threads come in whole numbers: this many more are none too many."""

OpName = tuple[str, int, int]
"""(label, step, tag)"""


@dataclass(frozen=True)
class Violation:
    at_s: float
    rule: str
    peer: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {f'peer {self.peer}: ' if self.peer else ''}{self.text}"


@dataclass
class _Attempt:
    peer: str
    number: int
    launched_s: float
    ended_s: float | None = None
    verdict: str | None = None
    what: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Counts:
    peers: int = 0
    sessions: int = 0
    ops: int = 0
    results: int = 0
    aborts: int = 0
    syncs: int = 0
    trained: int = 0
    evictions: int = 0

    def __str__(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in vars(self).items() if count)


def check(histories: Mapping[str, Sequence[Event]], seed: int, load: Load) -> tuple[list[Violation], Counts]:
    """Return every broken promise, in the order of time, and what was looked at."""
    checker = _Checker(histories, seed, load)
    return sorted(checker.violations(), key=lambda each: each.at_s), checker.counts


class _Checker:
    def __init__(self, histories: Mapping[str, Sequence[Event]], seed: int, load: Load) -> None:
        self._histories = histories
        self._seed = seed
        self._load = load
        self._attempts: dict[OpName, list[_Attempt]] = defaultdict(list)
        self._ops: dict[int, dict[int, Op]] = {}
        self.counts = Counts(peers=len(histories))

    def violations(self) -> Iterator[Violation]:
        for peer, events in self._histories.items():
            yield from self._one_peer(peer, events)
            yield from _leaks(peer, events)
        for name in self._attempts:
            yield from self._one_op(name, self._attempts[name])
        yield from self._states()
        yield from self._trained()

    def _op(self, name: OpName) -> Op | None:
        _, step, tag = name
        if step not in self._ops:
            self._ops[step] = {op.tag: op for op in values.ops_of_step(self._seed, step, self._load)}
        return self._ops[step].get(tag)

    # What one peer's reports show by themselves.

    def _one_peer(self, peer: str, events: Iterable[Event]) -> Iterator[Violation]:
        open_attempts: dict[OpName, _Attempt] = {}
        last_step: dict[tuple[str, int], int] = {}
        outputs: dict[int, str] = {}
        for event in events:
            what = event.what
            match event.kind:
                case "joined":
                    self.counts.sessions += 1
                case "left":
                    self.counts.evictions += 1
                    open_attempts.clear()
                    outputs = {}
                case "synced":
                    self.counts.syncs += 1
                case "crash":
                    yield Violation(event.at_s, "crash", peer, what["text"])
                case "touched":
                    yield Violation(event.at_s, "input", peer, what["text"])
                case "launch":
                    name = what["label"], what["step"], what["op"]
                    if name in open_attempts:
                        yield Violation(event.at_s, "order", peer, f"{_text(name)} was launched twice at a time")
                    made = _Attempt(peer, what["number"], event.at_s)
                    open_attempts[name] = made
                    self._attempts[name].append(made)
                    yield from self._input(event, name, "as it was launched")
                case "end":
                    name = what["label"], what["step"], what["op"]
                    attempt = open_attempts.pop(name, None)
                    if attempt is None:
                        yield Violation(event.at_s, "order", peer, f"{_text(name)} has ended and was never launched")
                        continue
                    attempt.ended_s, attempt.verdict, attempt.what = event.at_s, what["verdict"], what
                    if what["verdict"] != COMMITTED:
                        self.counts.aborts += 1
                    elif last_step.get((name[0], name[2]), -1) >= name[1]:
                        before = last_step[name[0], name[2]]
                        yield Violation(event.at_s, "order", peer, f"{_text(name)} was committed after step {before}")
                    else:
                        last_step[name[0], name[2]] = name[1]
                    op = self._op(name)
                    if what["verdict"] == COMMITTED and op is not None and op.is_applied:
                        outputs[op.tag] = what["output"]
                    if what["input"]:
                        yield from self._input(event, name, f"after {what['verdict']}")
                case "state":
                    for name in open_attempts:
                        yield Violation(event.at_s, "order", peer, f"{_text(name)} has not ended, and its peer goes on")
                    open_attempts.clear()
                    applied = dict(what["applied"])
                    if applied != outputs:
                        text = f"revision {what['revision']}: what was applied is not what was committed"
                        yield Violation(event.at_s, "state", peer, f"{text}: {applied}, {outputs}")
                    outputs = {}

    def _input(self, event: Event, name: OpName, when: str) -> Iterator[Violation]:
        op = self._op(name)
        if op is None:
            yield Violation(event.at_s, "order", event.peer, f"{_text(name)} is none of its step's")
            return
        expected = values.digest(values.contribution(self._seed, event.peer, name[0], name[1], op))
        if event.what["input"] != expected:
            yield Violation(event.at_s, "input", event.peer, f"the input of {_text(name)} is another one {when}")

    # What all peers' reports of one op show.

    def _one_op(self, name: OpName, attempts: list[_Attempt]) -> Iterator[Violation]:
        committed = [each for each in attempts if each.verdict == COMMITTED]
        if not committed:
            return
        self.counts.ops += 1
        self.counts.results += len(committed)
        first = committed[0]
        assert first.ended_s is not None
        peers = tuple(first.what["peers"])
        for each in committed[1:]:
            if tuple(each.what["peers"]) != peers:
                text = f"{_text(name)} was committed among {list(peers)} by {first.peer}, and among "
                yield _of(each, "verdict", f"{text}{each.what['peers']} here")
                return
        by_number: dict[int, list[_Attempt]] = defaultdict(list)
        for each in attempts:
            by_number[each.number].append(each)
        names = {number: each[0].peer for number, each in by_number.items()}
        for number, found in by_number.items():
            if len({each.peer for each in found}) > 1:
                yield _of(found[0], "verdict", f"{_text(name)}: number {number} was given to two peers")
                return
        for number in peers:
            if number not in names:
                yield _of(first, "verdict", f"{_text(name)} has number {number} in it, without a launch")
                return
        for each in committed:
            rank = each.what["rank"]
            if each.number not in peers or not 0 <= rank < len(peers) or peers[rank] != each.number:
                yield _of(each, "verdict", f"number {each.number} of rank {rank} has the result of {list(peers)}")
                return
            if each.what["world"] != len(peers):
                yield _of(each, "verdict", f"{_text(name)}: a world of {each.what['world']} with {list(peers)} in it")
        yield from self._real_time(name, committed, by_number)
        yield from self._contradicted(name, committed, by_number)
        yield from self._bytes(name, committed, [names[number] for number in peers])

    def _real_time(
        self, name: OpName, committed: list[_Attempt], by_number: Mapping[int, list[_Attempt]]
    ) -> Iterator[Violation]:
        earliest = min(committed, key=lambda each: each.ended_s or 0.0)
        assert earliest.ended_s is not None
        for number in earliest.what["peers"]:
            own = by_number[number]
            own = [each for each in own if each.verdict == COMMITTED] or [each for each in own if _is_open(each)] or own
            launched_s = min(each.launched_s for each in own)
            if launched_s > earliest.ended_s:
                late_s = launched_s - earliest.ended_s
                who = by_number[number][0].peer
                text = f"{_text(name)} was committed {late_s:.3f} s before peer {who}, a participant, launched it"
                yield _of(earliest, "real time", text)

    def _contradicted(
        self, name: OpName, committed: list[_Attempt], by_number: Mapping[int, list[_Attempt]]
    ) -> Iterator[Violation]:
        for number in committed[0].what["peers"]:
            own = by_number[number]
            if not any(each.verdict == COMMITTED or _is_open(each) for each in own):
                last = own[-1]
                text = f"{_text(name)} was committed by peer {committed[0].peer} with this peer in it, which heard "
                yield _of(last, "verdict", f"{text}{last.verdict}: {last.what.get('text', '')}")
        for number, own in by_number.items():
            if sum(each.verdict == COMMITTED for each in own) > 1:
                yield _of(own[-1], "verdict", f"{_text(name)} was committed twice by number {number}")

    def _bytes(self, name: OpName, committed: list[_Attempt], participants: list[str]) -> Iterator[Violation]:
        op = self._op(name)
        if op is None:
            return  # reported where it was launched
        label, step, _ = name
        given = [values.contribution(self._seed, peer, label, step, op) for peer in participants]
        if op.kind != values.REDUCE_SCATTER and len({each.what["output"] for each in committed}) > 1:
            found = {each.peer: each.what["output"] for each in committed}
            yield _of(committed[0], "bytes", f"{_text(name)} ({op}) has different bytes: {found}")
            return
        for each in committed:
            expected = values.result(op, given, each.what["rank"])
            if op.is_exact:
                if each.what["output"] != values.digest(expected):
                    who = f"participants {participants}, rank {each.what['rank']}"
                    yield _of(each, "sum", f"{_text(name)} ({op}) is not what its inputs give: {who}")
                continue
            limit = values.tolerance(op, len(given))
            sample, wanted = each.what["sample"], values.sample(expected)
            if len(sample) != len(wanted) or not all(abs(a - b) <= limit for a, b in zip(sample, wanted, strict=True)):
                yield _of(each, "sum", f"{_text(name)} ({op}): {sample} is not what its inputs give: {wanted}")

    # States.

    def _states(self) -> Iterator[Violation]:
        chains: dict[tuple[str, int], tuple[str, Event]] = {}
        bulks: dict[tuple[str, int], tuple[str, Event]] = {}
        events = sorted(
            (event for history in self._histories.values() for event in history), key=lambda event: event.at_s
        )
        own_chain: dict[str, str] = {}
        revisions: dict[str, int] = {}
        places: set[tuple[str, int]] = set()
        for event in events:
            what = event.what
            if event.kind not in ("lineage", "synced", "state"):
                continue
            place = what["label"], what["revision"]
            where = f"revision {place[1]} of {place[0]}"
            before = revisions.get(event.peer)
            revisions[event.peer] = place[1]
            if event.kind == "synced" and place not in places:
                yield Violation(event.at_s, "state", event.peer, f"a sync led to {where}, which no peer has had")
            places.add(place)
            if event.kind == "lineage":
                if what["base"] is None:
                    own_chain[event.peer] = bytes(16).hex()
                continue
            if event.kind == "state":
                if before is not None and place[1] != before + 1:
                    yield Violation(event.at_s, "state", event.peer, f"{where} was made of revision {before}")
                applied = [(tag, found) for tag, found in what["applied"]]
                expected = values.next_chain(bytes.fromhex(own_chain[event.peer]), applied).hex()
                if what["chain"] != expected:
                    yield Violation(event.at_s, "state", event.peer, f"{where} does not follow from what was applied")
            own_chain[event.peer] = what["chain"]
            for seen, part in ((chains, "chain"), (bulks, "bulk")):
                if part not in what:
                    continue
                other, by = seen.setdefault(place, (what[part], event))
                if other != what[part]:
                    text = f"the {part} at {where} is {what[part]}, and {other} with peer {by.peer}"
                    yield Violation(event.at_s, "state", event.peer, text)

    def _trained(self) -> Iterator[Violation]:
        digests: dict[tuple[str, int], Event] = {}
        for history in self._histories.values():
            for event in history:
                if event.kind == "trained":
                    self.counts.trained += 1
                    place = event.what["label"], event.what["revision"]
                    other = digests.setdefault(place, event)
                    if other.what["digest"] != event.what["digest"]:
                        where = f"revision {place[1]} of {place[0]}"
                        text = f"the digest at {where} is not that of peer {other.peer}"
                        yield Violation(event.at_s, "state", event.peer, text)


def _leaks(peer: str, events: Iterable[Event]) -> Iterator[Violation]:
    usage = [event for event in events if event.kind == "usage"]
    if not usage:
        return
    begin_s, end_s = usage[0].at_s + FLAT_AFTER_S, usage[-1].at_s
    if end_s < begin_s + FLAT_FOR_S:
        return
    part_s = (end_s - begin_s) / 4
    early = [event for event in usage if begin_s <= event.at_s <= begin_s + part_s]
    late = [event for event in usage if event.at_s >= end_s - part_s]
    for name in ("rss", "descriptors", "threads"):
        before, after = (statistics.median(event.what[name] for event in part) for part in (early, late))
        if after > before * (1 + FLAT_SHARE) and (name == "rss" or after > before + FLAT_COUNT):
            text = f"{name} went from {before:.0f} to {after:.0f} within {end_s - begin_s:.0f} s"
            yield Violation(end_s, "leak", peer, text)


def _is_open(attempt: _Attempt) -> bool:
    """Whether the others may have committed it, for all that its peer was told."""
    return attempt.verdict is None or attempt.verdict in INDEFINITE


def _of(attempt: _Attempt, rule: str, text: str) -> Violation:
    return Violation(attempt.ended_s or attempt.launched_s, rule, attempt.peer, text)


def _text(name: OpName) -> str:
    label, step, tag = name
    return f"op {tag} of step {step} of {label}"
