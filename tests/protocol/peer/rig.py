"""A peer's machine with a master that is spoken for, for tests of its parts."""

from __future__ import annotations

from typing import TypeVar

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind, OpRef
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.machine import Peer

ME = 2


TAG = 7


E = TypeVar("E")


class Rig:
    """Peer 2, a master that is spoken for, and what came out since one last looked."""

    def __init__(
        self, connections: int = 1, may_grow: bool = False, engine_threads: int = 1, secret: bytes = b""
    ) -> None:
        self.machine = Peer(0, connections, may_grow)
        self.links: dict[int, int] = {}
        """Link numbers by peer."""
        self.missing: dict[int, int] = {}
        """Connections that links lack before they stand."""
        self.hear(m.Welcome(ME, "run", 1, engine_threads=engine_threads, secret=secret))

    def hear(self, *messages: m.FromMaster) -> list[ps.Effect]:
        for message in messages:
            self.machine.received(message)
        return self.effects()

    def effects(self) -> list[ps.Effect]:
        found = self.machine.drain()
        for effect in found:
            if isinstance(effect, ps.MakeLink):
                self.links[effect.member.peer] = effect.link
                self.missing[effect.link] = effect.connections
        return found

    def join(self, ring: list[int], view: int = 1, **more: int) -> None:
        """The view is prepared, its links are made, and it is put in force."""
        self.hear(prepare(ring, view))
        for peer in ring:
            self.connect(peer)
        self.hear(m.Install(view))

    def connect(self, peer: int) -> list[ps.Effect]:
        for _ in range(self.missing.pop(self.links.get(peer, 0), 0)):
            self.machine.link_connected(self.links[peer])
        return self.effects()

    def launch(
        self, op: int, tag: int = TAG, now: float = 0.0, pair: tuple[int, bool] | None = None
    ) -> list[ps.Effect]:
        self.machine.launch(op, tag, now, pair)
        return self.effects()

    def done(self, *ops: int) -> list[ps.Effect]:
        for op in ops:
            self.machine.op_done(op, 1, 2)
        return self.effects()

    def ended(self, op: int) -> list[ps.Effect]:
        self.machine.op_ended(op, 1, 2)
        return self.effects()

    def group_call(self, call: int, kind: str = Kind.UPDATE_TOPOLOGY) -> list[ps.Effect]:
        self.machine.group_call(call, kind)
        return self.effects()


def member(peer: int, connections: int = 1) -> m.PeerInfo:
    return m.PeerInfo(peer, 0, [f"10.0.0.{peer}"], 1000 + peer, connections)


def prepare(
    ring: list[int], view: int, epoch: int | None = None, commits: list[OpRef] | None = None, **more: object
) -> m.Prepare:
    rings = [m.Ring(0, view if epoch is None else epoch, ring), m.Ring(9, 1, [90, 91])]
    members = [member(peer) for peer in (*ring, 90, 91)]
    return m.Prepare(view, members, rings, commits or [], **more)  # type: ignore[arg-type]


def of(kind: type[E], effects: list[ps.Effect]) -> list[E]:
    return [effect for effect in effects if isinstance(effect, kind)]


def said(effects: list[ps.Effect]) -> list[m.FromPeer]:
    return [effect.message for effect in of(ps.ToMaster, effects)]


def meshed(outlives_masters: bool = False) -> Rig:
    """Peer 2 in a mesh of three."""
    rig = Rig()
    rig.machine.outlives_masters = outlives_masters
    rig.hear(prepare([1, 2, 3], 1))
    for peer in (1, 2, 3):
        rig.connect(peer)
    rig.hear(m.Install(1, is_meshed=True))
    return rig


def completed(rig: Rig, op: int) -> list[ps.Effect]:
    rig.machine.op_completed(op)
    return rig.effects()


def commit(rig: Rig, op: int) -> None:
    rig.launch(op)
    rig.done(op)
    completed(rig, op)
