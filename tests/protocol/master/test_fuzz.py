"""A master among liars: peers say anything at any time, and nothing but their own place is at stake.

What they say is drawn close to what could be true (the present epoch, the flush under way, a number off by one), for
nothing else gets past the first comparison.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from pccl.protocol.codec import ProtocolError
from pccl.protocol.master.effects import Close, Effect, FindRings, Send
from pccl.protocol.master.machine import Master
from pccl.protocol.master.run_state import RunState
from pccl.protocol.messages import Kind, OpRef
from pccl.types import Result

GROUPS = 2
CONNECTIONS = 4

numbers = st.integers(0, 6)
off = st.sampled_from([0, 0, 0, 0, 0, 1, -1])
"""Numbers that are added to one that would be right."""
tags = st.integers(0, 1)
ops = st.lists(st.builds(OpRef, tags, tags), max_size=3)
codes = st.sampled_from([*Result, 99, -1])
peers = st.integers(0, 8)
offers = st.builds(
    m.SyncOffer,
    st.sampled_from(["enforce_popular", "enforce_popular", "receive_only", "send_only", "bogus"]),
    st.integers(-1, 2),
    st.sampled_from([b"a", b"b"]),
    st.sampled_from([[], [], [m.TensorOffer("loose", "float32", [1], True)]]),
)
metrics = st.builds(m.LinkMetric, peers, st.booleans(), st.floats(), st.integers())
failed = st.lists(st.tuples(peers, st.just("?")), max_size=2)


class Liars:
    """Connections to a master, each with a peer that says what it is made to say."""

    def __init__(self) -> None:
        self.master = Master(RunState("run"))
        self.now = 0.0
        self.open: set[int] = set()
        self.heartbeats: set[int] = set()
        """Connections for heartbeats."""
        self.group: dict[int, int] = {}
        self.next_connection = 1
        self.asked: dict[int, m.FromMaster] = {}
        """The last question to each that is open."""

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, FindRings):
                rings = {group: list(problem.ring[::-1]) for group, problem in effect.problems.items()}
                self.carry_out(self.master.rings_found(effect.search, rings, self.now))
            elif isinstance(effect, Close):
                self.open.discard(effect.connection)
                self.heartbeats.discard(effect.connection)
            elif isinstance(effect, Send):
                assert effect.connection in self.open | self.heartbeats, "words to one who is gone"
                if isinstance(effect.message, m.OpAbort):
                    assert effect.message.code in m.FAILURES
                if isinstance(effect.message, m.Flush | m.Prepare | m.SyncPlan | m.Probe):
                    self.asked[effect.connection] = effect.message

    def come(self, group: int) -> None:
        connection = self.next_connection
        self.next_connection += 1
        self.open.add(connection)
        self.group[connection] = group
        self.carry_out(self.master.connected(connection, "10.0.0.1", self.now))
        self.say(connection, m.Hello(m.PROTOCOL_VERSION, "1.0", group, [], 5000, 1))
        heartbeats = self.next_connection
        self.next_connection += 1
        self.heartbeats.add(heartbeats)
        self.carry_out(self.master.connected(heartbeats, "10.0.0.1", self.now))
        self.say(heartbeats, m.HeartbeatHello(m.PROTOCOL_VERSION, "run", self.master.state.next_peer - 1))

    def say(self, connection: int, message: m.FromPeer) -> None:
        self.carry_out(self.master.received(connection, message, self.now))

    def go(self, connection: int) -> None:
        self.open.discard(connection)
        self.carry_out(self.master.disconnected(connection, "reset", self.now))

    def lose_heartbeats(self, connection: int, by_silence: bool) -> None:
        self.heartbeats.discard(connection)
        if by_silence:
            self.carry_out(self.master.silent(connection, 5.0, self.now))
        else:
            self.carry_out(self.master.disconnected(connection, "reset", self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.master.tick(self.now))
        deadline = self.master.deadline()
        assert deadline is None or deadline > self.now

    def number(self, connection: int, kind: type[m.FromMaster], name: str) -> int:
        asked = self.asked.get(connection)
        return getattr(asked, name) if isinstance(asked, kind) else 0

    def epoch(self, connection: int) -> int:
        groups = self.master.state.groups
        group = self.group[connection]
        return groups[group].epoch if group in groups else 0


def words(liars: Liars, connection: int, data: st.DataObject) -> m.FromPeer:
    draw = data.draw

    def about(kind: type[m.FromMaster], name: str) -> int:
        return liars.number(connection, kind, name) + draw(off)

    def call() -> m.JointCall:
        kind = draw(st.sampled_from([*Kind.ALL, "dance"]))
        return m.JointCall(draw(numbers), kind, draw(offers) if (kind == Kind.SYNC) == (draw(off) == 0) else None)

    def failure() -> m.OpFailed:
        return m.OpFailed(liars.epoch(connection) + draw(off), draw(tags), draw(tags), draw(codes), "?")

    said: list[tuple[int, Callable[[], m.FromPeer]]] = [
        (1, lambda: m.Hello(m.PROTOCOL_VERSION, "1.0", 0, [], 5000, 1)),
        (1, m.Leave),
        (1, lambda: m.HeartbeatHello(m.PROTOCOL_VERSION, "run", draw(peers))),
        (1, lambda: m.JointCancel(draw(numbers))),
        (4, call),
        (2, failure),
        (4, lambda: m.LinksReady(about(m.Prepare, "view"), draw(failed), draw(failed))),
        (2, lambda: m.LinkLost(liars.master.state.view + draw(off), draw(peers), "?")),
        (4, lambda: m.OpsDone(liars.epoch(connection) + draw(off), draw(ops))),
        (2, lambda: m.OpsStalled(liars.epoch(connection) + draw(off), draw(ops))),
        (4, lambda: m.FlushReply(about(m.Flush, "flush"), draw(ops))),
        (2, lambda: m.SyncReport(about(m.SyncPlan, "sync"), draw(st.booleans()), "?", draw(failed))),
        (2, lambda: m.Probes(about(m.Probe, "probe"), draw(st.lists(metrics, max_size=3)))),
        (2, lambda: m.Report(draw(st.lists(st.tuples(numbers, numbers, numbers), max_size=3)), 1, draw(numbers))),
    ]
    return draw(st.sampled_from([make for weight, make in said for _ in range(weight)]))()


@given(st.data())
@settings(max_examples=200)
def test_nothing_that_is_said_confuses_the_master(data: st.DataObject) -> None:
    liars = Liars()
    for _ in range(data.draw(st.integers(1, 60))):
        what = data.draw(
            st.sampled_from(["come", "go", "wait", "break off", "fall silent", *["answer"] * 6, *["say"] * 12])
        )
        if what == "come" or not liars.open:
            if len(liars.open) < CONNECTIONS:
                liars.come(data.draw(st.integers(0, GROUPS - 1)))
            continue
        connection = data.draw(st.sampled_from(sorted(liars.open)))
        if what == "go":
            liars.go(connection)
        elif what in ("break off", "fall silent"):
            if liars.heartbeats:
                liars.lose_heartbeats(data.draw(st.sampled_from(sorted(liars.heartbeats))), what == "fall silent")
        elif what == "wait":
            liars.wait(data.draw(st.sampled_from([1.0, 11.0, 91.0])))
        elif what == "answer":
            asked = liars.asked.get(connection)
            if isinstance(asked, m.Prepare):
                liars.say(connection, m.LinksReady(asked.view))
            elif isinstance(asked, m.Flush):
                liars.say(connection, m.FlushReply(asked.flush, data.draw(ops)))
        else:
            liars.say(connection, words(liars, connection, data))
    for connection in sorted(liars.open):
        liars.go(connection)
    assert not liars.master.accepted
    assert not liars.master.pending
    assert liars.master.deadline() is None


members = st.builds(m.PeerInfo, peers, st.just(0), st.just(["10.0.0.1"]), st.just(5000), st.integers(1, 2))
rings = st.builds(m.Ring, st.integers(0, 1), numbers, st.lists(peers, min_size=1, max_size=4, unique=True))
from_master: st.SearchStrategy[m.FromMaster] = st.one_of(
    st.builds(m.Welcome, st.integers(1, 3), st.just("run"), st.just(1), numbers),
    st.builds(m.Goodbye, codes, st.just("?")),
    st.builds(m.Flush, numbers, numbers),
    st.builds(
        m.Prepare,
        numbers,
        st.just([m.PeerInfo(peer, 0, ["10.0.0.1"], 5000, 1) for peer in range(9)]) | st.lists(members),
        st.lists(rings, min_size=1, max_size=2),
        ops,
        st.lists(st.tuples(peers, peers), max_size=2),
        failed,
    ),
    st.builds(m.Install, numbers),
    st.builds(m.OpsCommit, numbers, ops),
    st.builds(m.OpAbort, numbers, tags, tags, codes, st.just("?")),
    st.builds(m.JointResult, numbers, codes, st.just("?"), numbers),
    st.builds(m.SyncPlan, numbers, numbers, st.just(b""), st.lists(peers, max_size=3), st.booleans(), st.booleans()),
    st.builds(m.Probe, numbers, st.lists(st.tuples(peers, st.booleans()), max_size=3)),
)


@given(st.data())
@settings(max_examples=200)
def test_nothing_that_a_master_says_confuses_a_peer(data: st.DataObject) -> None:
    """The peer's caller gets an answer to every call, and its engine every op back, whatever comes."""
    machine = ps.Peer(0, 1)
    machine.received(m.Welcome(1, "run", 1, 0))
    opened: set[int] = set()
    done: set[int] = set()
    ended: set[int] = set()
    launched = 0
    called: set[int] = set()
    answered: set[int] = set()
    links: set[int] = set()

    def carry_out() -> None:
        for effect in machine.drain():
            if isinstance(effect, ps.SubmitOp):
                opened.add(effect.op)
            elif isinstance(effect, ps.EndOp):
                opened.remove(effect.op)
                machine.op_ended(effect.op, 1, 1)
                carry_out()
            elif isinstance(effect, ps.ForgetOp):
                opened.remove(effect.op)
            elif isinstance(effect, ps.OpResult):
                assert effect.op not in ended
                ended.add(effect.op)
            elif isinstance(effect, ps.CallResult):
                assert effect.call not in answered
                answered.add(effect.call)
            elif isinstance(effect, ps.MakeLink):
                links.add(effect.link)
            elif isinstance(effect, ps.CloseLink):
                links.remove(effect.link)
            elif isinstance(effect, ps.FreezeOps):
                machine.frozen(effect.epoch)

    def hear(message: m.FromMaster) -> None:
        try:
            machine.received(message)
        except ProtocolError as error:
            machine.master_lost(str(error))

    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(
            st.sampled_from(["hear", "install", "launch", "done", "call", "link", "offer", "lost", "tick"])
        )
        if what == "hear":
            hear(data.draw(from_master))
        elif what == "install":
            view = machine.views.last + 1
            ring = data.draw(st.sampled_from([[1], [1, 2], [1, 2, 3]]))
            hear(
                m.Prepare(view, [m.PeerInfo(peer, 0, ["10.0.0.1"], 5000, 1) for peer in ring], [m.Ring(0, view, ring)])
            )
            hear(m.Install(view))
        elif what == "launch":
            launched += 1
            machine.launch(launched, data.draw(st.integers(0, 1)), 0.0)
        elif what == "done" and opened - done:
            op = data.draw(st.sampled_from(sorted(opened - done)))
            done.add(op)
            machine.op_done(op)
        elif what == "call":
            number = len(called)
            called.add(number)
            machine.joint(number, data.draw(st.sampled_from(Kind.ALL)))
        elif what == "link" and links:
            machine.link_connected(data.draw(st.sampled_from(sorted(links))))
        elif what == "offer":
            machine.link_offered(data.draw(peers), data.draw(numbers))
        elif what == "lost" and links:
            machine.link_lost(data.draw(st.sampled_from(sorted(links))), "reset")
        elif what == "tick":
            machine.tick(100.0)
            deadline = machine.deadline()
            assert deadline is None or deadline > 100.0
        carry_out()
    machine.master_lost("over")
    carry_out()
    assert ended == set(range(1, launched + 1))
    assert answered == called
    assert not opened
    assert not links
