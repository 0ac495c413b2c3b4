"""Somebody says what no peer and no master of the run ever says: it is refused, and the run goes on."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.codec import ProtocolError
from pccl.protocol.failover.machine import Failover
from pccl.protocol.master.effects import Close, Effect, Send
from pccl.types import Result
from tests.simulation.node import Node
from tests.simulation.trials.membership import STRANGERS_FROM, Membership

OF_NOBODY = 10**6
"""More than any number of a peer of a run is above the highest one."""
TERMS_AHEAD = (1, 2, 50)


class ForgedResume(Membership):
    """Somebody says that it is of the run, and has followed a master in a higher term. It is none of those whom the
    master leads, so nobody minds, and it hears that the run has gone on without it."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        host = self._leader
        leaders = {node: (node.leader, node.number) for node in world.accepted}
        who = max(number for _, number in leaders.values()) + OF_NOBODY
        one = world.accepted[0]
        resume = _resume(one, host.machine.master.term + rng.choice(TERMS_AHEAD), who, world.addresses)
        said = _say(host.machine, 0, [resume], world.clock(host))
        refusals = [message for message in said if isinstance(message, m.Goodbye)]
        assert [each.code for each in refusals] == [Result.MASTER_CONNECTION_FAILED], f"{who} is answered with {said}"
        assert "has gone on without peer" in refusals[0].reason, refusals[0]
        world.run()
        for node, (leader, number) in leaders.items():
            is_led = node.leader is leader and node.number == number and node.masterless_since is None
            assert is_led, f"{node} has lost its master for the word of one who is not led by it"
        self._be_whole()


class ForgedReport(Membership):
    """At a master that leads nothing somebody says that it is of a run, and what cannot be true: it is sent away."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        one, term = rng.choice(world.accepted), self._leader.machine.master.term
        machine = Failover("of nobody", world.options)
        machine.begin(0.0, 0.0)
        resume = _resume(one, term, one.number, world.addresses)
        summary = one.machine.views.summary()
        assert summary.installed is not None
        rings = summary.installed.rings
        without_it = [msgspec.structs.replace(each, peers=[p for p in each.peers if p != one.number]) for each in rings]
        lies = [msgspec.structs.replace(summary, installed=None, is_settled=True)]
        for each in ([*rings, *rings], without_it):
            installed = msgspec.structs.replace(summary.installed, rings=each)
            lies.append(msgspec.structs.replace(summary, installed=installed))
        lie = rng.choice(lies)
        said = _say(machine, 0, [resume, lie], 1.0)
        refusals = [message.reason for message in said if isinstance(message, m.Goodbye)]
        assert len(refusals) == 1, f"a report that cannot be true is answered with {said}"
        assert "contradicts itself" in refusals[0], refusals
        said = _say(machine, 1, [resume, summary], 2.0)
        assert not any(isinstance(message, m.Goodbye) for message in said), f"{one} tells the truth, and hears {said}"


class ForgedMaster(Membership):
    """Something that is no master of the run speaks to its peers as one: it has no second number for them, and nobody
    follows it in a term that has had its master."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        node = rng.choice(world.accepted)
        number, term = node.number, node.machine.term
        welcome = m.Welcome(number + OF_NOBODY, node.run, term, 0, peer_timeout_s=self._timeout_s)
        _refuses(node, welcome)
        assert node.machine.peer == number, f"{node} has another number by a second Welcome"
        if not world.masters:
            return
        for host in world.hosts:
            if not host.is_dead:
                world.kill_master(host)
        self._drain()
        for request in (m.VoteRequest(term), m.VoteRequest(term - 1)):
            _refuses(node, request)
            assert node.machine.term == term, f"{node} follows somebody in term {request.term}, after {term}"
        for host in world.hosts:
            world.restart_master(host)
        self._all_are_led(world.accepted, node.run, 20 * self._timeout_s * self._slack)
        self._be_whole()


def _resume(node: Node, term: int, peer: int, masters: int) -> m.Resume:
    return m.Resume(m.PROTOCOL_VERSION, node.run, term, peer, masters=masters, is_accepted=True)


def _say(machine: Failover, number: int, messages: Sequence[m.FromPeer], now: float) -> list[m.FromMaster]:
    """Have a stranger connect and say something. Return what it is answered."""
    connection = STRANGERS_FROM + number
    effects: list[Effect] = machine.connected(connection, "10.1.0.1", now)
    for message in messages:
        effects += machine.received(connection, message, now)
    ours = [each for each in effects if isinstance(each, Send | Close) and each.connection == connection]
    if not any(isinstance(each, Close) for each in ours):
        machine.disconnected(connection, "it hangs up", now)
    return [each.message for each in ours if isinstance(each, Send)]


def _refuses(node: Node, message: m.FromMaster) -> None:
    """Have a peer hear what no master can say there."""
    try:
        node.machine.received(message)
    except ProtocolError:
        return
    raise AssertionError(f"{node} takes in {message}")
