"""The diagnosis of ways: one that is slow, loses packets or swallows them is named soon, and no other ever is."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pccl.protocol.diagnosis import Diagnosis, GroupScene, Scene
from pccl.protocol.diagnosis.findings import Kind
from pccl.protocol.messages import LinkReport, PathTrial, Report
from tests.protocol.diagnosis_world import EPOCH, SETTLED_S, Direction, World, few, named_within, worlds


@few
@given(worlds, st.randoms(use_true_random=False))
def test_a_slow_way_is_named(world: World, chance: Random) -> None:
    world.run(SETTLED_S)
    way = tuple(chance.sample(range(1, world.peers + 1), 2))
    world.slow_way = way[0], way[1]
    world.way_factor = 10 + 3 * world.step_s / world.op_s
    named_within(world, (Kind.SLOW_WAY, *world.slow_way))


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_way_of_two_peers_is_named(seed: int) -> None:
    world = World(2, seed, step_s=0.05, op_s=1.3)
    world.run(30.0)
    assert world.names() == []
    world.slow_way, world.way_factor = (2, 1), 4.0
    world.run(12.0)
    assert world.names() == [(Kind.SLOW_WAY, 2, 1)]


@pytest.mark.parametrize(
    ("lying", "full_ms", "round_trip_ms", "named"),
    [(1.0, 100, 60, []), (1.6, 0, 60, []), (2.2, 0, 30, []), (3.0, 0, 60, [(1, 2)])],
)
def test_of_two_ways_that_are_alike_none_is_slow(
    lying: float, full_ms: int, round_trip_ms: int, named: list[tuple[int, int]]
) -> None:
    """Two peers that reduce large vectors without pause have no third way to compare with, and on one of the two always
    lies a little more. `lying` is how many times as much on the first, and `full_ms` for how long it was found full."""
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2], EPOCH, True)], {}, frozenset())
    for at in range(1, 24):
        for peer, more, full in ((1, lying, full_ms), (2, 1.0, 0)):
            link = LinkReport(
                3 - peer,
                2_000_000 * at,
                busy_ms=485 * at,
                full_ms=full * at,
                delivered=1400 * at,
                lying_byte_s=int(300_000 * more * at),
                round_trip_us=1000 * round_trip_ms if at > 2 else 21_000,
            )
            report = Report([(EPOCH, at, 0)], 0, 0, links=[link], in_ops_ms=490 * at, at_ms=500 * at)
            diagnosis.reported(peer, 0, report, 100 + at / 2)
        diagnosis.judge(scene, 100 + at / 2)
    assert [(each.peer, each.to) for each in diagnosis.findings(112.0)] == named


@pytest.mark.parametrize("queue_ms", [0, 200])
@pytest.mark.parametrize("back_bytes", [0, 200_000, 300_000_000])
def test_a_way_is_not_slow_for_carrying_what_the_way_back_does_not(queue_ms: int, back_bytes: int) -> None:
    """Broadcasts, reduces and gathers of two peers go one way, and fill it."""
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2], EPOCH, True)], {}, frozenset())
    for at in range(1, 24):
        for peer, busy_ms, tx_bytes in ((1, 320, 500_000_000), (2, 50, back_bytes)):
            link = LinkReport(
                3 - peer,
                tx_bytes * at,
                busy_ms=busy_ms * at,
                delivered=(7000 if peer == 1 else 20) * at,
                lying_byte_s=(3_000_000 if peer == 1 else 100) * at,
                round_trip_us=1000 * (21 + queue_ms * (peer == 1)) if at > 2 else 21_000,
            )
            report = Report([(EPOCH, at, 0)], 0, 0, links=[link], in_ops_ms=490 * at, at_ms=500 * at)
            diagnosis.reported(peer, 0, report, 100 + at / 2)
        diagnosis.judge(scene, 100 + at / 2)
        assert diagnosis.findings(100 + at / 2) == []


@dataclass
class Way:
    """What a way does in a second."""

    tx_bytes: int
    busy: float
    lying_bytes: int
    round_trip_ms: int = 60


SMALL = Way(500, 0.4, 500)


@pytest.mark.parametrize(
    ("ways", "named"),
    [
        # A broadcast goes from 1 to 2, and from there to 3: nothing paces the root, and what the way before has paced
        # does not queue.
        ({(1, 2): Way(2_000_000, 0.98, 350_000), (2, 3): Way(2_000_000, 0.7, 110_000)}, []),
        ({(1, 2): Way(2_000_000, 0.98, 350_000), (2, 3): Way(2_000_000, 0.3, 30_000)}, []),
        ({(1, 2): Way(2_000_000, 0.8, 110_000), (2, 3): Way(2_000_000, 0.98, 350_000)}, [(2, 3)]),
        # The root sends something to one only.
        ({(1, 2): Way(2_000_000, 0.98, 350_000)}, []),
        # Two gather at a third, and as much from each, or more from one.
        ({(2, 1): Way(2_000_000, 0.98, 350_000), (3, 1): Way(2_000_000, 0.3, 30_000)}, [(2, 1)]),
        ({(2, 1): Way(2_000_000, 0.98, 350_000), (3, 1): Way(2_000_000, 0.8, 110_000)}, [(2, 1)]),
        ({(2, 1): Way(2_000_000, 0.98, 350_000), (3, 1): Way(1_000_000, 0.3, 30_000)}, []),
        # All go around a ring.
        (
            {(1, 2): Way(2_000_000, 0.98, 350_000)} | dict.fromkeys([(2, 3), (3, 1)], Way(2_000_000, 0.4, 1000)),
            [(1, 2)],
        ),
        (
            {(1, 2): Way(2_000_000, 0.98, 350_000)} | dict.fromkeys([(2, 3), (3, 1)], Way(2_000_000, 0.7, 90_000)),
            [(1, 2)],
        ),
    ],
)
def test_a_way_is_slow_beside_ways_that_have_the_same_to_do(
    ways: dict[tuple[int, int], Way], named: list[tuple[int, int]]
) -> None:
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2, 3], EPOCH, True)], {}, frozenset())
    for at in range(1, 30):
        for peer in (1, 2, 3):
            links = []
            for other in {1, 2, 3} - {peer}:
                way = ways.get((peer, other), SMALL)
                links.append(
                    LinkReport(
                        other,
                        way.tx_bytes * at // 2,
                        busy_ms=int(500 * way.busy * at),
                        delivered=50 * at,
                        lying_byte_s=way.lying_bytes * at // 2,
                        round_trip_us=1000 * way.round_trip_ms if at > 2 else 20_000,
                    )
                )
            report = Report([(EPOCH, at, 0)], 0, 0, links=links, in_ops_ms=490 * at, at_ms=500 * at)
            diagnosis.reported(peer, 0, report, 100 + at / 2)
        diagnosis.judge(scene, 100 + at / 2)
    assert [(each.peer, each.to) for each in diagnosis.findings(114.5)] == named


def judge_ring(diagnosis: Diagnosis, scene: Scene, at: int, sick: LinkReport) -> None:
    """Judge a ring of three after so many rounds of half a second: peer 1 tells this of its way, and the others tell
    of ways that carry as much, and have little to do."""
    for peer, other in ((1, 2), (2, 3), (3, 1)):
        sound = LinkReport(
            other,
            sick.tx_bytes,
            busy_ms=60 * at,
            delivered=sick.delivered,
            lying_byte_s=2000 * at,
            round_trip_us=21_000,
        )
        links = [sick if peer == 1 else sound]
        report = Report([(EPOCH, at, 0)], 0, 0, links=links, in_ops_ms=480 * at, at_ms=500 * at)
        diagnosis.reported(peer, 0, report, 100 + at / 2)
    diagnosis.judge(scene, 100 + at / 2)


@pytest.mark.parametrize(("queue_ms", "kind"), [(0, Kind.LOSSY), (60, Kind.SLOW_WAY)])
def test_a_way_that_loses_packets_in_bursts_is_not_called_slow(queue_ms: int, kind: str) -> None:
    """It is slow for what it loses, unless the losses are those of a full queue, which a slow way has."""
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2, 3], EPOCH, True)], {}, frozenset())
    resent = 0
    for at in range(1, 30):
        resent += 10 * (at % 12 not in (1, 3, 4, 6, 7))
        sick = LinkReport(
            2,
            20_000 * at,
            busy_ms=450 * at,
            delivered=100 * at,
            resent=resent,
            lying_byte_s=30_000 * at,
            round_trip_us=1000 * (21 + queue_ms) if at > 2 else 21_000,
        )
        judge_ring(diagnosis, scene, at, sick)
        assert {each.kind for each in diagnosis.findings(100 + at / 2)} <= {kind}
    assert [(each.kind, each.peer, each.to) for each in diagnosis.findings(114.5)] == [(kind, 1, 2)]


@pytest.mark.parametrize(("queue_ms", "kind"), [(0, Kind.LOSSY), (100, Kind.SLOW_WAY)])
def test_a_way_whose_bandwidth_collapses_is_slow_though_its_queue_loses_most(queue_ms: int, kind: str) -> None:
    """What TCP had under way does not fit into the queue any more, and much of it is sent again in vain."""
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2, 3], EPOCH, True)], {}, frozenset())
    for at in range(1, 16):
        sick = LinkReport(
            2,
            20_000 * at,
            busy_ms=490 * at,
            delivered=445 * at,
            resent=800 * at,
            lying_byte_s=700_000 * at,
            round_trip_us=1000 * (31 + queue_ms) if at > 2 else 31_000,
        )
        judge_ring(diagnosis, scene, at, sick)
        assert {each.kind for each in diagnosis.findings(100 + at / 2)} <= {kind}
    assert [(each.kind, each.peer, each.to) for each in diagnosis.findings(107.5)] == [(kind, 1, 2)]


@pytest.mark.parametrize(("resent", "named"), [(12, [(Kind.LOSSY, 1, 2)]), (1, [])])
def test_a_way_that_stands_still_after_each_loss_is_lossy(resent: int, named: list[tuple[str, int, int]]) -> None:
    """Where a packet is lost again and again TCP waits ever longer, and nothing moves for a second."""
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2], EPOCH, True)], {}, frozenset())
    for at in range(1, 19):
        moved = (at + 2) // 3
        for peer in (1, 2):
            link = LinkReport(
                3 - peer,
                200_000 * moved,
                busy_ms=450 * at,
                delivered=60 * moved,
                resent=resent * moved if peer == 1 else 0,
                stuck_ms=500 * ((at + 2) % 3) if peer == 1 else 0,
                round_trip_us=5_000,
            )
            report = Report([(EPOCH, moved, 0)], 0, 0, links=[link], in_ops_ms=480 * at, at_ms=500 * at)
            diagnosis.reported(peer, 0, report, 100 + at / 2)
        diagnosis.judge(scene, 100 + at / 2)
    assert [(each.kind, each.peer, each.to) for each in diagnosis.findings(108.5)] == named


@pytest.mark.parametrize(
    ("counts", "round_trips_ms"),
    [
        ([(600, 25), (600, 25), (0, 0), (0, 0)], [5, 5, 5, 5]),
        ([(600, 25)] * 4, [60, 6, 6, 6]),
    ],
)
def test_losses_of_few_bursts_and_of_a_queue_that_is_seen_now_and_then_are_no_lossy_way(
    counts: list[tuple[int, int]], round_trips_ms: list[int]
) -> None:
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2], EPOCH, True)], {}, frozenset())
    delivered = resent = 0
    for at in range(1, 30):
        delivered, resent = delivered + counts[at % 4][0], resent + counts[at % 4][1]
        for peer in (1, 2):
            link = LinkReport(
                3 - peer,
                1000 * delivered,
                busy_ms=200 * at,
                delivered=delivered,
                resent=resent if peer == 1 else 0,
                round_trip_us=1000 * (round_trips_ms[at % 4] if peer == 1 else 5),
            )
            report = Report([(EPOCH, at, 0)], 0, 0, links=[link], in_ops_ms=250 * at, at_ms=500 * at)
            diagnosis.reported(peer, 0, report, 100 + at / 2)
        diagnosis.judge(scene, 100 + at / 2)
        assert diagnosis.findings(100 + at / 2) == []


@pytest.mark.parametrize(
    ("counts", "trial", "named"),
    [
        # One packet of a lossy way is lost again and again.
        ([(334, 90), (3, 3), (0, 1), (0, 1)], PathTrial.CARRIES, Kind.LOSSY),
        # Large packets vanish, with all that was under way, or all do.
        ([(8000, 300), (600, 250), (0, 1), (0, 1)], PathTrial.SMALL_ONLY, Kind.MTU),
        ([(300, 5), (3, 3), (2, 1), (0, 1)], PathTrial.SMALL_ONLY, Kind.MTU),
        ([(300, 5), (0, 3), (0, 1), (0, 1)], PathTrial.NOTHING, Kind.BLOCKED),
        # An outage that is over.
        ([(300, 20), (0, 3), (0, 1), (0, 1)], PathTrial.CARRIES, ""),
    ],
)
def test_what_stands_still_after_losses_is_a_lossy_way(
    counts: list[tuple[int, int]], trial: PathTrial, named: str
) -> None:
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2], EPOCH, True)], {}, frozenset())
    delivered = resent = 0
    for at in range(1, 9):
        more, again = counts[at - 5] if at > 4 else (300, 0)
        delivered, resent = delivered + more, resent + again
        stuck_ms = max(0, 500 * (at - 5))
        for peer in (1, 2):
            link = LinkReport(
                3 - peer,
                480_000 * min(at, 5),
                busy_ms=450 * at,
                delivered=delivered if peer == 1 else 300 * at,
                resent=resent if peer == 1 else 0,
                stuck_ms=stuck_ms if peer == 1 else 0,
                round_trip_us=10_000,
                trial=trial if peer == 1 and stuck_ms > 1100 else PathTrial.NONE,
            )
            report = Report([(EPOCH, min(at, 5), 0)], 0, 0, links=[link], in_ops_ms=480 * at, at_ms=500 * at)
            diagnosis.reported(peer, 0, report, 100 + at / 2)
        diagnosis.judge(scene, 100 + at / 2)
    found = [(each.kind, each.peer, each.to) for each in diagnosis.findings(104.0)]
    assert found == ([(named, 1, 2)] if named else [])


@pytest.mark.parametrize("resent", [9, 12, 30])
@pytest.mark.parametrize(("period", "long"), [(4, {1}), (5, {1}), (6, {0, 1})])
def test_a_lossy_way_is_not_called_slow_for_a_round_trip_that_took_a_retransmission(
    resent: int, period: int, long: set[int]
) -> None:
    """Now and then one is measured that has waited for a packet to be sent again; a full queue is always there."""
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2, 3], EPOCH, True)], {}, frozenset())
    for at in range(1, 40):
        for peer, other in ((1, 2), (2, 3), (3, 1)):
            is_sick = peer == 1 and at > 8
            link = LinkReport(
                other,
                200_000 * at,
                busy_ms=60 * at + (390 * (at - 8) if is_sick else 0),
                delivered=135 * at,
                resent=resent * (at - 8) if is_sick else 0,
                lying_byte_s=1000 * at + (10_000 * (at - 8) if is_sick else 0),
                round_trip_us=40_000 if is_sick and at % period in long else 2_000,
            )
            report = Report([(EPOCH, at, 0)], 0, 0, links=[link], in_ops_ms=480 * at, at_ms=500 * at)
            diagnosis.reported(peer, 0, report, 100 + at / 2)
        diagnosis.judge(scene, 100 + at / 2)
        assert {each.kind for each in diagnosis.findings(100 + at / 2)} <= {Kind.LOSSY}
        if at in (14, 39):
            assert [(each.kind, each.peer, each.to) for each in diagnosis.findings(100 + at / 2)] == [
                (Kind.LOSSY, 1, 2)
            ]


def test_a_way_that_was_called_lossy_when_it_became_slow_is_called_slow_soon() -> None:
    """What was under way gets lost, and the queue is seen a moment later. Then the losses are few, and it stays."""
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2, 3], EPOCH, True)], {}, frozenset())
    resent = 0
    for at in range(1, 24):
        resent += {9: 300, 10: 40, 11: 20}.get(at, 2 if at > 11 else 0)
        sick = LinkReport(
            2,
            20_000 * at,
            busy_ms=60 * at + 430 * max(0, at - 8),
            delivered=300 * at,
            resent=resent,
            lying_byte_s=2_000 * at + 40_000 * max(0, at - 8),
            round_trip_us=100_000 if at > 9 else 21_000,
        )
        judge_ring(diagnosis, scene, at, sick)
        if at == 14:
            named = [(each.kind, each.peer, each.to) for each in diagnosis.findings(100 + at / 2)]
            assert named == [(Kind.LOSSY, 1, 2), (Kind.SLOW_WAY, 1, 2)]
    assert [(each.kind, each.peer, each.to) for each in diagnosis.findings(111.5)] == [(Kind.SLOW_WAY, 1, 2)]


@pytest.mark.parametrize(("lossy", "named"), [((3, 1), {(Kind.LOSSY, 3, 1)}), ((1, 2), set())])
def test_a_lossy_way_is_named_beside_a_slow_uplink_that_it_is_not_part_of(
    lossy: Direction, named: set[tuple[str, int, int | None]]
) -> None:
    """And the uplink stays slow. What is lost on a way of its own is lost in its queue, which is not seen each time."""
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2, 3], EPOCH, True)], {}, frozenset())
    for at in range(1, 80):
        is_queue_seen = lossy != (1, 2) or at <= 24 or at % 3 == 0
        for peer in (1, 2, 3):
            slow_for = max(0, at - 8) if peer == 1 else 0
            links = [
                LinkReport(
                    other,
                    200_000 * at,
                    busy_ms=60 * at + 390 * slow_for,
                    delivered=135 * at,
                    resent=15 * max(0, at - 24) if (peer, other) == lossy else 0,
                    lying_byte_s=1_000 * at + 40_000 * slow_for,
                    round_trip_us=100_000 if slow_for and is_queue_seen else 2_000,
                )
                for other in {1, 2, 3} - {peer}
            ]
            report = Report([(EPOCH, at, 0)], 0, 0, links=links, in_ops_ms=480 * at, at_ms=500 * at)
            diagnosis.reported(peer, 0, report, 100 + at / 2)
        diagnosis.judge(scene, 100 + at / 2)
        if at == 24:
            found = [(each.kind, each.peer, each.to) for each in diagnosis.findings(112.0)]
            assert found == [(Kind.SLOW_WAY, 1, None)]
    found = [(each.kind, each.peer, each.to) for each in diagnosis.findings(139.5)]
    assert set(found) == {(Kind.SLOW_WAY, 1, None)} | named


def judge_pair(diagnosis: Diagnosis, at: int, sick: LinkReport) -> None:
    """Judge two peers after so many rounds of half a second: the first tells this of its way, the other of a way
    without losses."""
    for peer, link in ((1, sick), (2, LinkReport(1, 480_000 * at, busy_ms=200 * at, delivered=1000 * at))):
        report = Report([(EPOCH, at, 0)], 0, 0, links=[link], in_ops_ms=480 * at, at_ms=500 * at)
        diagnosis.reported(peer, 0, report, 100 + at / 2)
    diagnosis.judge(Scene([GroupScene(0, [1, 2], EPOCH, True)], {}, frozenset()), 100 + at / 2)


@pytest.mark.parametrize(
    "counts",
    [
        [(2150, 2), (0, 1), (100, 100), (2500, 245)],
        [(400, 2), (0, 2), (0, 1), (0, 1), (120, 60), (300, 60)],
        [(400, 2), (0, 0), (0, 1), (120, 60), (300, 60)],
    ],
)
def test_a_way_is_not_lossy_after_an_outage(counts: list[tuple[int, int]]) -> None:
    """All that was under way is sent again when it is over, by one connection after the other."""
    diagnosis = Diagnosis()
    delivered = resent = stuck_ms = 0
    for at, (more, again) in enumerate([(4300, 0)] * 6 + counts + [(4300, 0)] * 4, 1):
        delivered, resent = delivered + more, resent + again
        stuck_ms = stuck_ms + 500 if not more else 0
        trial = PathTrial.CARRIES if stuck_ms > 1100 else PathTrial.NONE
        sick = LinkReport(
            2, 480_000 * at, busy_ms=450 * at, delivered=delivered, resent=resent, stuck_ms=stuck_ms, trial=trial
        )
        judge_pair(diagnosis, at, sick)
        assert diagnosis.findings(100 + at / 2) == []


def test_of_two_ways_with_tiny_ops_none_is_slow_for_late_acknowledgements() -> None:
    """Whoever answers after a little compute acknowledges with the answer, and nothing queues."""
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2], EPOCH, True)], {}, frozenset())
    for at in range(1, 24):
        for peer, busy_ms in ((1, 100), (2, 480)):
            link = LinkReport(
                3 - peer,
                170_000 * at,
                busy_ms=busy_ms * at,
                delivered=700 * at,
                lying_byte_s=busy_ms * at,
                round_trip_us=80,
            )
            report = Report([(EPOCH, 700 * at, 0)], 0, 0, links=[link], in_ops_ms=490 * at, at_ms=500 * at)
            diagnosis.reported(peer, 0, report, 100 + at / 2)
        diagnosis.judge(scene, 100 + at / 2)
        assert diagnosis.findings(100 + at / 2) == []


@few
@given(worlds, st.randoms(use_true_random=False), st.floats(0.06, 0.3))
def test_a_lossy_way_is_named(world: World, chance: Random, loss: float) -> None:
    world.run(SETTLED_S)
    way = tuple(chance.sample(range(1, world.peers + 1), 2))
    world.losses[way[0], way[1]] = loss
    named_within(world, (Kind.LOSSY, way[0], way[1]))


@pytest.mark.parametrize("end", [0, 1])
def test_all_ways_of_a_peer_are_named_once(end: int) -> None:
    world = World(4)
    world.run(SETTLED_S)
    world.losses = {(2, other) if end == 0 else (other, 2): 0.1 for other in (1, 3, 4)}
    named_within(world, (Kind.LOSSY, 2, None))
    assert ("uplink" if end == 0 else "downlink") in world.named[0][1].suspect.text


def test_a_way_is_named_with_its_line_and_not_beside_it() -> None:
    """One way shows it first, and then all of them."""
    world = World(3)
    world.run(SETTLED_S)
    world.losses = {(1, 2): 0.1}
    world.run(4.0)
    world.losses = {(1, 2): 0.1, (3, 2): 0.1}
    world.run(5.0)
    assert [(each.kind, each.peer, each.to) for each in world.diagnosis.findings(world.now)] == [(Kind.LOSSY, 2, None)]
    assert world.names() == [(Kind.LOSSY, 1, 2), (Kind.LOSSY, 2, None)]


@pytest.mark.parametrize("is_root_heard", [True, False])
@pytest.mark.parametrize("answers", [True, False])
def test_a_dead_way_is_named_in_its_direction_where_payload_goes_one_way(is_root_heard: bool, answers: bool) -> None:
    """A root broadcasts, and the way to a peer or back is dead: nothing is acknowledged to the root either way.
    `answers`: the peer has something under way as well."""
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2, 3], EPOCH, True)], {}, frozenset())
    again, named = 0, set()
    for at in range(1, 24):
        stuck_ms = 500 * (at - 12) + 200 if at > 12 else 0
        trial = PathTrial.NOTHING if stuck_ms > 1000 else PathTrial.NONE
        again += at in (13, 15, 18)  # TCP sends again after ever longer times
        sent = min(at, 12)
        to_peer = LinkReport(
            2,
            2_000_000 * sent,
            delivered=100 * sent,
            resent=again,
            received=30 * sent + (again if not is_root_heard and answers else 0),
            stuck_ms=stuck_ms,
            round_trip_us=100_000,
            trial=trial,
        )
        to_root = LinkReport(
            1,
            0,
            delivered=30 * sent,
            resent=again if answers else 0,
            received=100 * sent + (again if is_root_heard else 0),
            stuck_ms=stuck_ms if answers else 0,
            round_trip_us=100_000,
            trial=trial if answers else PathTrial.NONE,
        )
        to_third = LinkReport(3, 2_000_000 * sent, delivered=100 * sent, received=30 * sent)
        for peer, links in ((1, [to_peer, to_third]), (2, [to_root]), (3, [])):
            report = Report([(EPOCH, sent, 0)], 0, 0, links=links, in_ops_ms=490 * at, at_ms=500 * at)
            diagnosis.reported(peer, 0, report, 100 + at / 2)
        diagnosis.judge(scene, 100 + at / 2)
        named |= {(each.kind, each.peer, each.to) for each in diagnosis.findings(100 + at / 2)}
    assert named == {(Kind.BLOCKED, 2, 1) if is_root_heard else (Kind.BLOCKED, 1, 2)}


def test_links_on_which_nothing_is_sent_are_no_ways_of_a_line() -> None:
    """They are reported for what comes over them. All ways of a peer that are used are its uplink."""
    diagnosis = Diagnosis()
    scene = Scene([GroupScene(0, [1, 2, 3, 4], EPOCH, True)], {}, frozenset())
    for at in range(1, 24):
        for peer in (1, 2, 3, 4):
            links = [
                LinkReport(
                    other,
                    (100_000 if peer == 1 and other != 4 else 0) * at,
                    busy_ms=100 * at,
                    delivered=100 * at,
                    resent=10 * at if peer == 1 and other != 4 else 0,
                    received=100 * at,
                    round_trip_us=20_000,
                )
                for other in (1, 2, 3, 4)
                if other != peer
            ]
            report = Report([(EPOCH, at, 0)], 0, 0, links=links, in_ops_ms=300 * at, at_ms=500 * at)
            diagnosis.reported(peer, 0, report, 100 + at / 2)
        diagnosis.judge(scene, 100 + at / 2)
    assert [(each.kind, each.peer, each.to) for each in diagnosis.findings(111.5)] == [(Kind.LOSSY, 1, None)]
