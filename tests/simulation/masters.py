"""The masters of a simulated run: what they decide is carried out here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pccl.protocol import messages as m
from pccl.protocol.codec import FrameCache
from pccl.protocol.master.run_state import Close, Effect, FindRings, MasterLog, Persist, Send, TakeHeartbeats
from pccl.runtime.master.ring_search import best_ring
from tests.simulation.checks import check_ring
from tests.simulation.connections import Control
from tests.simulation.master_host import MasterHost
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

    def begin(self, host: MasterHost, hold_s: float, hold_beside_s: float = 0.0) -> None:
        """Start a master's process. It founds no run for `hold_s`, nor, if there are other masters, for
        `hold_beside_s`."""
        scene = self._scene
        self._runs += 1
        is_standby = host.name != MASTER and not scene.is_one_name
        host.begin(self._runs, scene.options, scene.clock(host), hold_s, hold_beside_s, is_standby, scene.memory)

    def carry_out(self, host: MasterHost, effects: list[Effect]) -> None:
        """Carry out what a master's machine has just decided. To be called after each of its calls."""
        scene = self._scene
        if host.is_dead:
            return
        if host.unfinished:
            host.unfinished += effects  # of an event that came to it together with the one within which it was stopped
            return
        checks = scene.checks
        self._note_founding(host)
        checks.turn_begins(host.process)
        cache = FrameCache()
        is_whole = not host.is_going_on
        if host.name in scene.dooms:
            carried_out = scene.before_doom(host, effects)
            is_whole = is_whole and len(carried_out) == len(effects)
            host.unfinished = effects[len(carried_out) :]
            effects = carried_out
        for effect in effects:
            if isinstance(effect, MasterLog):
                scene.log.append(effect.text)
                continue
            if isinstance(effect, Persist):
                host.record = effect.record
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
            assert not control.is_over, f"{effect} to {control.node}, which is gone"
            if isinstance(effect, Close):
                control.is_over = True
                checks.gone(control)
                control.hang_up()
            else:
                self._send(control, effect.message, cache)
        checks.turn_ends(is_whole)
        if host.unfinished:
            scene.dooms.pop(host.name).strike()

    def go_on(self, host: MasterHost) -> None:
        """Carry out what a process was stopped before."""
        effects, host.unfinished = host.unfinished, []
        host.is_going_on = True
        self.carry_out(host, [each for each in effects if not self._is_late(each)])
        host.is_going_on = False

    def _is_late(self, effect: Effect) -> bool:
        """Whether an effect is for a connection that has ended since."""
        connection = getattr(effect, "connection", 0)
        if connection >= HEARTBEATS_FROM:
            return not any(connection in host.heartbeats for host in self._scene.hosts)
        return connection in self._scene.controls and self._scene.controls[connection].is_over

    def _send(self, control: Control, message: m.FromMaster, cache: FrameCache) -> None:
        scene, node, host = self._scene, control.node, control.host
        scene.from_masters.append((node.name, message))
        if isinstance(message, m.Welcome) and control is not node.control:
            return  # it has come again over another connection
        company = []
        if isinstance(message, m.VoteRequest):
            company = [each.node for each in scene.controls.values() if each.host is host and not each.is_over]
        scene.checks.sent(control, host.process, message, company)
        frame = cache.frame(message)
        control.at_master.keep(frame)
        control.sent.append(frame)
        if not control.is_hung_up_on and not control.is_reset:
            control.inbox.append(frame)

    def is_member(self, control: Control) -> bool:
        return control.number in control.host.machine.master.state.peer_of

    def _note_founding(self, host: MasterHost) -> None:
        """Set apart the numbers of a run that may be founded by a machine that is new here."""
        master = host.machine.master
        if host.seen is not master:
            host.seen = master
            if master.state.term <= 1:
                self._runs += 1
                host.number(self._runs)

    def _find_rings(self, host: MasterHost, effect: FindRings) -> None:
        rings = {}
        for group, problem in effect.problems.items():
            rings[group] = best_ring(problem)
            check_ring(problem, rings[group])
        if not host.is_dead:
            self.carry_out(host, host.machine.rings_found(effect.search, rings, self._scene.clock(host)))
