"""Symptoms: what a kind of fault looks like in the evidence of one group.

Each function returns the suspects of one kind. A threshold is lower for what is named already (`named`), so that a
finding at the edge does not come and go.

What is not said. A peer that takes up to SLOW_FACTOR times as long between ops as the next slowest is no culprit, nor
is one whom the others wait for in less than LOST_SHARE of their time: fleets are not all of one kind. The same holds
for ways: WAY_FACTOR and BUSY_SHARE. A fleet that differs by more than that is told so, for as long as it does. Of two
peers, whose ways have only each other to be compared with, the slow one has to differ by WAY_FACTOR from its reverse.

Ways are compared with ways that have carried about as much payload. A way whose sender takes in little, such as the
root of a broadcast, is not compared with the ways after it: the root puts as much under way as may be, and they are
paced by what arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from itertools import islice

from pccl.protocol.diagnosis.evidence import (
    FRESH_S,
    LOAD_FACTOR,
    Direction,
    GroupEvidence,
    LinkRound,
    Sample,
    total,
)
from pccl.protocol.diagnosis.findings import DOWNLINK, UPLINK, Kind, Suspect
from pccl.protocol.diagnosis.lateness import ROUNDS_MIN, SLOW_FACTOR, between_ops, total_s
from pccl.protocol.messages import OpRef, PathTrial
from pccl.protocol.point_to_point import ranks_of

Named = Callable[[str, int, int | None], bool]
"""Whether somebody is named for something: the kind, the peer, and the receiver of a way."""
Name = Callable[[int], str]

ENDED_S, ENDED_FACTOR = 10.0, 3.0
"""Without another round for so long, and for so many times as long as the longest one, there are no ops any more that
could be waited for. Between two outer steps lie minutes."""
WAY_ROUNDS = 4
WAY_FACTOR = 2.0
BUSY_SHARE = 0.5
IN_OPS_SHARE = 0.5
"""Least share of their time that all peers spend in ops where a way is slow."""
LOADED_ROUNDS = 6
LOADED_BUSY_SHARE = 0.75
LOADED_FACTOR = 1.15
LYING_FACTOR = 1.5
"""Acknowledgements queue behind data, so the reverse of a slow way is busy, too; but less lies on it."""
REVERSE_FACTOR = 1.2
LOSS_SHARE = 0.03
LOSS_SHARE_STILL = 0.015
RESENT_MIN = 8
"""Number of packets sent again below which there is no telling."""
BURSTS_SHARE = 0.05
"""Share of packets sent again up to which a queue may have lost them that is not always there."""
LOST_MIN = 4
"""`RESENT_MIN` for a way that would be called slow: rather nothing is said of it for a while."""
AFTERMATH_ROUNDS = 2
"""Number of rounds after an outage in which what was under way is sent again."""
QUEUE_FACTOR, QUEUE_MS = 2.0, 10.0
"""A round trip this much longer than the least comes of a queue, which loses packets when it is full."""
STUCK_S = 1.1
UNDER_WAY_S = 0.2
"""Time for which a packet, or a report of it, may be under way, beside two round trips."""
UNDECIDED_S = 3.0
"""A way that has carried nothing for so long is dead in the direction in which it is stuck, unless more is known."""
STANDS_MS = 500
"""A way on which nothing was acknowledged for so long stands still, and is not just slow."""
LATE_SHARE = 0.4
LATE_SHARE_STILL = 0.2
"""Shares of the time by which the threads of a peer come late. One that is stopped for a tenth of a second in two comes
late for 20 to 40 %; on a crowded machine, so does the engine of a healthy root of large ops, for up to 28 %."""
SETTLED_S = 5.0
SETTLED_OPS = 5
"""Age of an epoch, and number of its ops, before which nobody is called slow."""
ABSENT_S = 10.0
"""Time for which others wait in an op before the peer that has not called it is named."""
ABSENT_AT_FIRST_S = 60.0
"""The same for the first ops of an epoch, in which programs compile and load."""
ABSENT_FACTOR = 3.0
"""A wait that came to an end by itself says that one of up to so many times its length may, too."""
CALL_ABSENT_S = 30.0
ASTRAY_NAMED_MAX = 8
"""Number of peers that are named where hardly any two wait in the same op."""


def silent(group: int, silent_s: Mapping[int, float], evidence: GroupEvidence, name: Name) -> list[Suspect]:
    """Return the peers of which no heartbeat comes."""
    found = []
    for peer, seconds in silent_s.items():
        if peer not in evidence.ring:
            continue
        trials = {_link_to(evidence, other, peer) for other in evidence.ring if other not in silent_s}
        how = ""
        if PathTrial.CARRIES in trials:
            how = ", though its machine answers: the process stands still (stopped, swapped out, or held by a debugger)"
        elif PathTrial.NOTHING in trials:
            how = ", and its machine does not answer: it is down, or cut off"
        text = f"{name(peer)} is silent: no heartbeat for {seconds:.1f} s{how}"
        found.append(Suspect(Kind.SILENT, group, peer, None, text, how))
    return found


def _link_to(evidence: GroupEvidence, peer: int, other: int) -> int:
    """Return how a peer's trial of its path to another went."""
    sample = evidence.last(peer)
    link = sample.links.get(other) if sample is not None else None
    return link.trial if link is not None else PathTrial.NONE


def dead_ways(group: int, evidence: GroupEvidence, unheard: Collection[int], now: float, name: Name) -> list[Suspect]:
    """Return the ways on which nothing gets across any more, by what trials of the paths have shown. Nothing is
    acknowledged over one of which the way back is dead, either, but its packets arrive."""
    found: dict[Direction, Suspect] = {}
    for peer in evidence.ring:
        sample = evidence.last(peer)
        if sample is None or now - sample.heard_at > FRESH_S or peer in unheard:
            continue
        for other, link in sample.links.items():
            if link.stuck_ms < STUCK_S * 1e3 or other not in evidence.ring or other in unheard:
                continue
            lies = f"nothing acknowledged for {link.stuck_ms / 1e3:.1f} s"
            if link.trial == PathTrial.SMALL_ONLY:
                text = (
                    f"large packets from {name(peer)} to {name(other)} vanish: {lies}, and a new connection carries "
                    "small packets only. Is the MTU of the path right?"
                )
                found[peer, other] = Suspect(Kind.MTU, group, peer, other, text)
            elif link.trial == PathTrial.NOTHING:
                arrives = _arrives(evidence, peer, other)
                if arrives is None and link.stuck_ms < UNDECIDED_S * 1e3:
                    continue
                if arrives:
                    text = (
                        f"nothing gets from {name(other)} to {name(peer)}: packets of the way back arrive, with "
                        f"{lies}, and no new connection can be made"
                    )
                    found.setdefault((other, peer), Suspect(Kind.BLOCKED, group, other, peer, text))
                else:
                    text = f"nothing gets from {name(peer)} to {name(other)}: {lies}, and no new connection can be made"
                    found[peer, other] = Suspect(Kind.BLOCKED, group, peer, other, text)
    return list(found.values())


def _arrives(evidence: GroupEvidence, sender: int, receiver: int) -> bool | None:
    """Whether packets of the sender have come to the receiver since nothing is acknowledged to the sender. None: that
    is not known yet, since the sender has sent nothing again of which the receiver would have told."""
    own = [(each.heard_at, each.links[receiver]) for each in evidence.samples[sender] if receiver in each.links]
    heard = [
        (each.heard_at, each.links[sender].received)
        for each in evidence.samples.get(receiver, ())
        if sender in each.links
    ]
    if not heard:
        return False
    last_at, last = own[-1]
    under_way_s = UNDER_WAY_S + 2 * last.round_trip_us / 1e6
    since = [(at, received) for at, received in heard if at >= last_at - last.stuck_ms / 1e3 + under_way_s]
    if not since:
        return None
    if since[-1][1] > since[0][1]:
        return True
    resent = [link.resent for at, link in own if since[0][0] <= at <= since[-1][0] - under_way_s]
    return False if resent and resent[-1] > resent[0] else None


def lossy_ways(group: int, evidence: GroupEvidence, named: Named, name: Name) -> list[Suspect]:
    """Return the ways that lose packets, and not because a queue is full."""
    rounds = list(evidence.link_rounds)
    if len(rounds) < WAY_ROUNDS:
        return []
    lossy: dict[Direction, LinkRound] = {}
    for way, last in rounds[-1].items():
        course = _course(evidence, way)
        if not course:
            continue
        whole = total(course)
        sent = whole.delivered + whole.resent
        limit = LOSS_SHARE_STILL if _is_lossy(way, named) else LOSS_SHARE
        if whole.resent < RESENT_MIN or whole.resent < limit * sent:
            continue
        is_spread = sum(each.resent > 0 for each in course) >= WAY_ROUNDS - 1 and not _is_outage(evidence, way)
        if last.stuck_ms >= STANDS_MS:
            # It may be a path that is dead: that is for trials of it to tell.
            is_spread = _is_alive(evidence, way, last)
        if is_spread and not _may_lose_by_its_queue(course):
            lossy[way] = whole

    def say(way: Direction) -> str:
        whole = lossy[way]
        share = whole.resent / (whole.delivered + whole.resent)
        return f"{share:.1%} of {whole.delivered + whole.resent} segments had to be sent again in {whole.seconds:.1f} s"

    return _gathered(Kind.LOSSY, group, lossy, rounds[-1], "loses packets", say, name)


def slow_ways(group: int, evidence: GroupEvidence, named: Named, name: Name) -> list[Suspect]:
    """Return the ways for which the ops wait. A lossy way is slow, too, but one with a queue that does not go away was
    called lossy for the packets that were under way when it became slow."""
    rounds = list(evidence.link_rounds)[-WAY_ROUNDS:]
    if len(rounds) < WAY_ROUNDS:
        return []
    course = {way: [each[way] for each in rounds if way in each] for way in rounds[-1]}
    whole = {way: total(each) for way, each in course.items() if len(each) == WAY_ROUNDS}
    busy = {way: each.busy for way, each in whole.items()}
    top = max(busy.values(), default=0.0)
    if top < BUSY_SHARE or not _all_in_ops(evidence):
        return []
    hot = {way for way in busy if busy[way] > top / WAY_FACTOR}
    for way in list(hot):
        reverse = way[1], way[0]
        if reverse in hot and _is_slower(whole[way], whole[reverse]):
            hot.discard(reverse)
    found = {way: whole[way] for way in hot}
    if any(each.receiver > each.busy / 2 for each in found.values()):
        return []
    if any(_is_lossy(way, named) and not all(map(_queues, course[way])) for way in found):
        return []
    if any(each.busy < BUSY_SHARE for each in found.values()):
        return _loaded_way(group, evidence, name)
    if not all(_carries(each) for way in found for each in course[way]):
        return []
    if len(found) > 1 and not all(map(_queues, found.values())):
        return []
    if any(_loses(course[way]) for way in found):
        return []
    rest = [way for way in busy if way not in hot and (way[1], way[0]) not in hot]
    others = {way: [busy[other] for other in rest if evidence.is_comparable(way, other)] for way in found}
    if not all(others[way] or _outweighs(way, whole, evidence) for way in found):
        return _loaded_way(group, evidence, name) if len(found) > 1 else []

    def say(way: Direction) -> str:
        each = found[way]
        rate = each.tx_bytes / each.seconds / each.busy
        return f"it is busy {each.busy:.0%} of the time with {_rate(rate)}, and the ops wait; " + (
            f"the next busiest way is busy {max(others[way]):.0%}"
            if others[way]
            else f"the way back is busy {busy[way[::-1]]:.0%}"
        )

    suspects = _gathered(Kind.SLOW_WAY, group, found, rounds[-1], "is slow", say, name)
    return suspects if len(suspects) == 1 else _loaded_way(group, evidence, name)


def _is_lossy(way: Direction, named: Named) -> bool:
    """Whether a way is named as lossy, alone or with all of one end."""
    return any(named(Kind.LOSSY, *key) for key in (way, (way[0], None), (way[1], None)))


def _loaded_way(group: int, evidence: GroupEvidence, name: Name) -> list[Suspect]:
    """Return the way on which far more lies than on others that have the same to do, in a queue, where none is busy for
    much longer than others: short ops wait for acknowledgements everywhere."""
    rounds = list(evidence.link_rounds)[-LOADED_ROUNDS:]
    if len(rounds) < LOADED_ROUNDS:
        return []
    whole = {way: total(course) for way in rounds[-1] if len(course := [each[way] for each in rounds if way in each])}
    top = max(whole, key=lambda way: whole[way].lying_byte_s, default=None)
    if top is None or (reverse := (top[1], top[0])) not in whole:
        return []
    lying = whole[top].lying_byte_s
    rest = [way for way in whole if way not in (top, reverse)]
    others = [whole[way].lying_byte_s for way in rest if evidence.is_comparable(top, way)]
    if not others and not _outweighs(top, whole, evidence):
        return []
    next_most = max(others, default=0)
    is_told_apart = lying >= WAY_FACTOR * next_most and lying >= LOADED_FACTOR * whole[reverse].lying_byte_s
    is_sound = all(_carries(each[top]) for each in rounds if top in each)
    if not lying or whole[top].busy < LOADED_BUSY_SHARE or not is_told_apart or not is_sound or not _queues(whole[top]):
        return []
    text = (
        f"the way from {name(top[0])} to {name(top[1])} is slow: {lying / whole[top].seconds:,.0f} bytes lie on it, "
        f"{next_most / whole[top].seconds:,.0f} on the next way, and the ops wait; a round trip takes "
        f"{whole[top].round_trip_ms:.0f} ms, {whole[top].least_round_trip_ms:.0f} ms without load"
    )
    return [Suspect(Kind.SLOW_WAY, group, *top, text)]


def _outweighs(way: Direction, whole: Mapping[Direction, LinkRound], evidence: GroupEvidence) -> bool:
    """Whether a way stands out from its reverse, where there is no third one to compare with: of two that are alike,
    one always carries or holds a little more, and where no queue is, that may be twice as much for seconds. Nor is one
    slow on which tiny ops wait for an acknowledgement that comes with the next op. Where only one of them carries
    something, as in a broadcast, there is nothing to compare."""
    own, reverse = whole[way], whole.get((way[1], way[0]))
    if reverse is None or evidence.carried(way) > LOAD_FACTOR * evidence.carried((way[1], way[0])):
        return False
    is_queue = _queues(own) or _queues(reverse)
    is_busier = own.busy >= WAY_FACTOR * reverse.busy and (is_queue or own.full_ms > 0)
    return is_busier or (is_queue and own.lying_byte_s > WAY_FACTOR * reverse.lying_byte_s)


def _is_alive(evidence: GroupEvidence, way: Direction, last: LinkRound) -> bool:
    """Whether packets get across a way that stands still, and were lost on it before in two rounds at least, while
    others arrived: one of them is lost again and again. An outage shows in one round, as it begins."""
    if last.stuck_ms < STUCK_S * 1e3 or _link_to(evidence, *way) != PathTrial.CARRIES:
        return False
    return sum(each.resent > 0 and each.delivered > 0 for each in _course(evidence, way)) > 1


def _course(evidence: GroupEvidence, way: Direction) -> list[LinkRound]:
    """Return the last rounds of a way. Where a packet is lost again and again, nothing moves for a while: such rounds
    tell nothing, nor do those in which a path was dead."""
    known = [each[way] for each in evidence.link_rounds if way in each]
    return [each for each in known if not _stands_still(each)][-WAY_ROUNDS:]


def _is_outage(evidence: GroupEvidence, way: Direction) -> bool:
    """Whether all losses of the last rounds are those of one outage, which has some as it begins, and sends what was
    under way again when it is over. On a lossy way nothing moves for a while again and again."""
    known = [each[way] for each in evidence.link_rounds if way in each]
    still = [at for at, each in enumerate(known) if _stands_still(each)]
    lost = [at for at, each in enumerate(known) if each.resent]
    if not still or not lost or still[-1] - still[0] >= len(still):
        return False
    return still[0] - 1 <= lost[0] and lost[-1] <= still[-1] + AFTERMATH_ROUNDS


def _stands_still(round_: LinkRound) -> bool:
    """Whether nothing has arrived that was under way."""
    return not round_.delivered and (round_.resent > 0 or round_.stuck_ms > 0)


def _loses(course: Collection[LinkRound]) -> bool:
    """Whether a way loses packets, and not because a queue is full: it may be lossy, and slow for that."""
    resent, delivered = sum(each.resent for each in course), sum(each.delivered for each in course)
    return resent >= max(LOST_MIN, LOSS_SHARE_STILL * (delivered + resent)) and not _loses_by_its_queue(course)


def _loses_by_its_queue(course: Collection[LinkRound]) -> bool:
    """Whether packets are lost because a queue is full. It is there in each round in which that happens, while on a way
    that loses packets anyhow a round trip is long now and then, which has waited for a packet to be sent again. A queue
    may lose more than half of what comes, when the bandwidth behind it collapses."""
    resent = sum(each.resent for each in course)
    return 2 * sum(each.resent for each in course if _queues(each)) >= resent


def _may_lose_by_its_queue(course: Collection[LinkRound]) -> bool:
    """Whether packets may be lost so, where that is not certain: few are lost, and the queue may be full for moments
    only, between which it is measured."""
    resent, delivered = sum(each.resent for each in course), sum(each.delivered for each in course)
    are_few = resent < BURSTS_SHARE * (delivered + resent)
    return _loses_by_its_queue(course) or (are_few and any(map(_queues, course)))


def _queues(round_: LinkRound) -> bool:
    return round_.round_trip_ms > QUEUE_FACTOR * round_.least_round_trip_ms + QUEUE_MS


def _carries(round_: LinkRound) -> bool:
    """Whether a way was busy in a round because it carried something, rather than nothing."""
    return round_.delivered > 0 and round_.stuck_ms < STANDS_MS and round_.busy >= BUSY_SHARE / 2


def _is_slower(one: LinkRound, other: LinkRound) -> bool:
    """Whether the first of two directions of a link is the slow one."""
    if max(one.lying_byte_s, other.lying_byte_s) >= LYING_FACTOR * min(one.lying_byte_s, other.lying_byte_s) + 1:
        return one.lying_byte_s > other.lying_byte_s
    if one.full_ms != other.full_ms and max(one.full_ms, other.full_ms) > 0:
        return one.full_ms > other.full_ms
    if one.busy >= REVERSE_FACTOR * other.busy:
        return True
    return other.busy < REVERSE_FACTOR * one.busy and one.tx_bytes > 2 * other.tx_bytes


def _all_in_ops(evidence: GroupEvidence) -> bool:
    """Whether all peers spend most of their time in ops: those that have ended, or the one that they are in."""
    for peer in evidence.ring:
        samples = list(islice(reversed(evidence.samples.get(peer, ())), WAY_ROUNDS + 1))
        if len(samples) < 2:
            return False
        span = samples[0].own_s - samples[-1].own_s
        if samples[0].in_ops_s - samples[-1].in_ops_s < IN_OPS_SHARE * span:
            return False
    return True


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8e-6:,.1f} Mbit/s"


def _gathered(
    kind: str,
    group: int,
    ways: Mapping[Direction, LinkRound],
    known: Iterable[Direction],
    verb: str,
    say: Callable[[Direction], str],
    name: Name,
) -> list[Suspect]:
    """Return suspects for sick ways: one for all ways from a peer, or to it, where all that are used are sick."""
    known = list(known)
    left = set(ways)
    found = []
    for end, line in enumerate((UPLINK, DOWNLINK)):
        for peer in sorted({way[end] for way in left}):
            own = {way for way in known if way[end] == peer}
            if len(own) < 2 or not own <= left:
                continue
            left -= own
            worst = max(own, key=lambda way: (ways[way].resent, ways[way].busy))
            text = f"the {line} of {name(peer)} {verb}: to peer {worst[1]} " if end == 0 else ""
            text = text or f"the {line} of {name(peer)} {verb}: from peer {worst[0]} "
            found.append(Suspect(kind, group, peer, None, text + say(worst), line=line))
    for way in sorted(left):
        text = f"the way from {name(way[0])} to {name(way[1])} {verb}: {say(way)}"
        found.append(Suspect(kind, group, *way, text))
    return found


def slow_peers(group: int, evidence: GroupEvidence, named: Named, now: float, name: Name) -> list[Suspect]:
    """Return the peer that launches ops late, again and again."""
    lateness, last = evidence.lateness, evidence.lateness.peer
    if last is None:
        return []
    rounds = lateness.rounds
    if now - rounds[-1].ended_at > max(ENDED_S, ENDED_FACTOR * max(each.seconds for each in rounds)):
        return []
    is_named = named(Kind.SLOW, last, None)
    is_settled = now - evidence.begun_at >= SETTLED_S and evidence.ops >= SETTLED_OPS
    shown = lateness.slow(is_named)
    if not shown or not (is_named or is_settled):
        return []
    own, next_slowest = between_ops(shown, last)
    text = (
        f"{name(last)} is slow: it spends {own:.0%} of the time between ops, the next slowest peer {next_slowest:.0%}; "
        f"the others wait for it, {sum(each.ops for each in shown)} ops in {total_s(shown):.1f} s"
    )
    return [Suspect(Kind.SLOW, group, last, None, text)]


def starved_peers(group: int, evidence: GroupEvidence, named: Named, name: Name) -> list[Suspect]:
    """Return the peer whose threads get no CPU while all others' do, in ops or between them."""
    rounds = list(evidence.late_rounds)[-ROUNDS_MIN:]
    if len(rounds) < ROUNDS_MIN or len(evidence.ring) < 2:
        return []
    mean = {peer: sum(each[peer] for each in rounds) / len(rounds) for peer in evidence.ring}
    worst = max(mean, key=lambda peer: mean[peer])
    rest = max(share for peer, share in mean.items() if peer != worst)
    limit = LATE_SHARE_STILL if named(Kind.SLOW, worst, None) else LATE_SHARE
    is_lasting = sum(each[worst] >= limit / 2 for each in rounds) >= ROUNDS_MIN - 1
    if mean[worst] < limit or mean[worst] < SLOW_FACTOR * rest or not is_lasting:
        return []
    text = (
        f"{name(worst)} is slow: its process runs too little (a busy machine, a CPU limit, or stopped repeatedly): "
        f"its threads came late for {mean[worst]:.0%} of the time, those of the next peer for {rest:.0%}"
    )
    return [Suspect(Kind.SLOW, group, worst, None, text)]


def absent(group: int, evidence: GroupEvidence, silent_s: Mapping[int, float], now: float, name: Name) -> list[Suspect]:
    """Return the peers that have not called an op in which all others wait, for long, and at least as many."""
    last = {peer: sample for peer in evidence.ring if (sample := evidence.last(peer)) is not None}
    waiting = {peer: sample for peer, sample in last.items() if _waits(sample, now)}
    missing = [peer for peer in last if peer not in waiting and not last[peer].op_wait_s]
    if len(last) < len(evidence.ring) or not missing or len(missing) > len(waiting):
        return []
    if len(missing) + len(waiting) < len(last) or any(peer in silent_s for peer in missing):
        return []
    waited_s = min(sample.op_wait_s for sample in waiting.values())
    if waited_s < _absent_s(evidence):
        return []
    return [
        Suspect(
            Kind.ABSENT,
            group,
            peer,
            None,
            f"{name(peer)} has not called the op that {_peers(len(waiting))} waited in for {waited_s:.0f} s; its "
            "process is alive: look at what its program does",
        )
        for peer in missing
    ]


def astray(
    group: int, evidence: GroupEvidence, stalled: Mapping[OpRef, Set[int]], now: float, name: Name
) -> list[Suspect]:
    """Return the peers that do not wait in the op in which most do, where all have waited for long in ops that none of
    them can end: they were called in different orders, or with different tags."""
    last = {peer: sample for peer in evidence.ring if (sample := evidence.last(peer)) is not None}
    if len(last) < len(evidence.ring) or not all(_waits(sample, now) for sample in last.values()):
        return []
    waited_s = min((sample.op_wait_s for sample in last.values()), default=0.0)
    if not stalled or waited_s < _absent_s(evidence):
        return []
    waiting = {op: peers & last.keys() for op, peers in stalled.items() if ranks_of(op.tag) is None}
    own = {peer: op for op, peers in waiting.items() for peer in peers}
    most = max(map(len, waiting.values()), default=0)
    if len(own) < len(last) or most == len(last):
        return []
    found: dict[int, Suspect] = {}
    for op, peers in waiting.items():
        for peer in evidence.ring:
            if len(peers) < most or peer in peers or peer in found or len(found) == ASTRAY_NAMED_MAX:
                continue
            text = (
                f"{name(peer)} has not called the op with tag {op.tag} that {_peers(len(peers))} waited in for "
                f"{waited_s:.0f} s, and waits in the op with tag {own[peer].tag}: do all call the same ops, in the "
                "same order?"
            )
            found[peer] = Suspect(Kind.ABSENT, group, peer, None, text)
    return list(found.values())


def _absent_s(evidence: GroupEvidence) -> float:
    """Return for how long others wait before whoever has not called an op is named."""
    at_first_s = ABSENT_S if evidence.ops >= SETTLED_OPS else ABSENT_AT_FIRST_S
    return max(at_first_s, ABSENT_FACTOR * evidence.longest_wait_s)


def _peers(count: int) -> str:
    return "1 other peer has" if count == 1 else f"{count} other peers have"


def _waits(sample: Sample, now: float) -> bool:
    return sample.op_wait_s > 0 and now - sample.heard_at <= FRESH_S


def absent_from_calls(
    group: int, waits: Mapping[str, tuple[float, int, Collection[int]]], silent_s: Mapping[int, float], name: Name
) -> list[Suspect]:
    """Return the peers that have not made a joint call in which others wait. `waits` has for each kind of call how long
    the first has waited, how many do, and who is missing."""
    return [
        Suspect(
            Kind.ABSENT,
            group,
            peer,
            None,
            f"{name(peer)} has not called {kind}, in which {_peers(count)} waited for {seconds:.0f} s",
        )
        for kind, (seconds, count, missing) in waits.items()
        if seconds >= CALL_ABSENT_S and len(missing) <= count
        for peer in missing
        if peer not in silent_s
    ]
