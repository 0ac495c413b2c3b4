"""The masters of a simulated run: what they decide is carried out here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pccl.protocol import messages as m
from pccl.protocol.codec import FrameCache
from pccl.protocol.master.effects import Close, Effect, FindRings, MasterLog, Persist, Send, TakeHeartbeats
from pccl.runtime.master.ring_search import best_ring
from tests.simulation.connections import Control
from tests.simulation.master_host import MasterHost, Memory
from tests.simulation.node import Node
from tests.simulation.scene import MASTER, Scene

HEARTBEATS_FROM = 1_000_000
"""Heartbeat connections are numbered from here."""


class Masters:
    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._runs = 0
        self._answer_heartbeat: Callable[[MasterHost, Send | Close | TakeHeartbeats], None] | None = None
        for host in scene.hosts:
            self.begin(host, 0.0)

    def on_heartbeats(self, answer: Callable[[MasterHost, Send | Close | TakeHeartbeats], None]) -> None:
        """Have what masters decide about heartbeat connections carried out elsewhere."""
        self._answer_heartbeat = answer

    def begin(self, host: MasterHost, hold_s: float) -> None:
        """Start a master's process, which founds no run for so long."""
        scene = self._scene
        self._runs += 1
        host.begin(self._runs, scene.options, scene.now, hold_s, host.name != MASTER, scene.memory)

    def carry_out(self, host: MasterHost, effects: list[Effect]) -> None:
        """Carry out what a master's machine has just decided. To be called after each of its calls."""
        scene = self._scene
        checks = scene.checks
        self._note_failover(host)
        # What it sends before it is deposed, or once it leads, is of another run than the other part.
        runs = {host.run, host.machine.run}
        accepted = [node for node in scene.nodes if node.is_accepted and node.home is host and node.machine.run in runs]
        results: list[tuple[Node, m.JointResult]] = []
        cache = FrameCache()
        for effect in effects:
            if isinstance(effect, MasterLog):
                scene.log.append(effect.text)
                continue
            if isinstance(effect, Persist):
                host.fence = effect.fence
                continue
            if isinstance(effect, FindRings):
                scene.events.later(host, partial(self._find_rings, host, effect))
                continue
            if effect.connection >= HEARTBEATS_FROM:
                assert self._answer_heartbeat is not None
                self._answer_heartbeat(host, effect)
                continue
            assert not isinstance(effect, TakeHeartbeats)
            control = scene.controls[effect.connection]
            node = control.node
            assert not control.is_over, f"{effect} to {node}, which is gone"
            if isinstance(effect, Close):
                control.is_over = True
                self.gone(control)
                control.hang_up()
                continue
            message = effect.message
            scene.from_masters.append((node.name, message))
            if isinstance(message, m.Welcome) and control is not node.control:
                continue  # it has come again over another connection, and is nobody here
            if isinstance(message, m.Welcome | m.Resumed):
                node.home = host
            checks.sent(node, message)
            if isinstance(message, m.VoteRequest) and len(scene.hosts) > 1:
                company = [each.node for each in scene.controls.values() if each.host is host and not each.is_over]
                checks.asked_to_follow(node, company)
            if isinstance(message, m.JointResult):
                results.append((node, message))
                # Whom the master lets go of after that, as when it is deposed by a further loss, has its result.
                accepted = [each for each in accepted if each.is_known]
            frame = cache.frame(message)
            control.at_master.keep(frame)
            control.sent.append(frame)
            if not control.is_hung_up_on and not control.is_reset:
                control.inbox.append(frame)
        if results:
            checks.joint_results(results[0][0].machine.run, results, accepted)
        run = host.run = host.machine.run
        if host.machine.master is not None:
            on_sites = [
                node for node in scene.nodes if node.machine.site and node.home is host and node.machine.run == run
            ]
            if on_sites:
                checks.sites(host.machine.master, on_sites)

    def gone(self, control: Control) -> None:
        """Note that a master has lost a node, evicted it or let it go, unless it knows the node by another connection.
        A connection that has ended since the node came anew may be waited for there in vain, and says nothing."""
        node = control.node
        others = [each for each in self._scene.controls.values() if each.node is node and each is not control]
        if not any(
            each is node.control or (each.host is control.host and not self._is_absent(each))
            for each in others
            if self.is_member(each)
        ):
            self._scene.checks.gone(node)

    def is_member(self, control: Control) -> bool:
        return control.number in control.host.machine.master.state.peer_of

    def _is_absent(self, control: Control) -> bool:
        state = control.host.machine.master.state
        return bool(state.members[state.peer_of[control.number]].absence)

    def _note_failover(self, host: MasterHost) -> None:
        """Note that another machine leads here, or none any more."""
        master = host.machine.master
        if host.seen is master:
            return
        host.seen = master
        if master.term > 1:
            hosts = self._scene.hosts
            rivals = [each.machine.master for each in hosts if each is not host and each.is_leading]
            is_fenced = self._scene.memory is Memory.DISK and len(hosts) == 1
            self._scene.checks.failed_over(master, self._scene.nodes, rivals, is_fenced)
        else:
            self._runs += 1
            host.number(self._runs)

    def _find_rings(self, host: MasterHost, effect: FindRings) -> None:
        rings = {}
        for group, problem in effect.problems.items():
            rings[group] = best_ring(problem)
            self._scene.checks.ring_found(problem, rings[group])
        if not host.is_dead:
            self.carry_out(host, host.machine.rings_found(effect.search, rings, self._scene.now))
