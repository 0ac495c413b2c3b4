"""Tags without number: what the machines remember of them stays bounded, and all peers go on naming ops alike."""

from __future__ import annotations

import pytest

from pccl.protocol import completion
from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from pccl.protocol.master.effects import Close, Effect, Send
from pccl.protocol.master.machine import Master
from pccl.protocol.master.run_state import RunState
from pccl.protocol.peer import Peer
from pccl.types import Result

HEARTBEATS_FROM = 1000


class Pair:
    """A master and two peers whose messages arrive at once, and whose engines are done at once."""

    def __init__(self) -> None:
        self.master = Master(RunState("run"))
        self.peers = {1: Peer(0, 1), 2: Peer(0, 1)}
        self.submitted: dict[int, tuple[int, int, int]] = {1: (0, 0, 0), 2: (0, 0, -1)}
        """The name of the last op of each peer."""
        self.results: dict[int, Result] = {}
        self.to_carry_out: list[Effect] = []
        for number in self.peers:
            hello = m.Hello(m.PROTOCOL_VERSION, "1.0", 0, [], 5000, 1)
            self.tell(number, hello)
            self.tell(HEARTBEATS_FROM + number, m.HeartbeatHello(m.PROTOCOL_VERSION, "run", number))
            if number == 2:
                self.peers[1].group_call(1, m.Kind.UPDATE_TOPOLOGY)
            self.settle()

    def tell(self, connection: int, message: m.FromPeer) -> None:
        if isinstance(message, m.Hello | m.HeartbeatHello):
            self.to_carry_out += self.master.connected(connection, "10.0.0.1", 0.0)
        self.to_carry_out += self.master.received(connection, message, 0.0)

    def settle(self) -> None:
        moved = True
        while moved:
            effects, self.to_carry_out = self.to_carry_out, []
            moved = bool(effects)
            for effect in effects:
                assert not isinstance(effect, Close)
                if isinstance(effect, Send):
                    self.peers[effect.connection].received(effect.message)
            for number, peer in self.peers.items():
                for done in peer.drain():
                    moved = True
                    self.carry_out(number, peer, done)

    def carry_out(self, number: int, peer: Peer, effect: ps.Effect) -> None:
        if isinstance(effect, ps.ToMaster):
            self.tell(number, effect.message)
        elif isinstance(effect, ps.MakeLink):
            assert peer.link_connected(effect.link)
        elif isinstance(effect, ps.SubmitOp):
            self.submitted[number] = effect.epoch, effect.tag, effect.sequence
            peer.op_done(effect.op)
            if self.submitted[1] == self.submitted[2]:
                for each in self.peers.values():
                    each.op_completed(effect.op)
        elif isinstance(effect, ps.EndOp):
            peer.op_ended(effect.op, 0, 0)
        elif isinstance(effect, ps.FreezeOps):
            peer.frozen(effect.epoch)
        elif isinstance(effect, ps.OpResult):
            self.results[number] = effect.code


@pytest.mark.parametrize(
    ("tags", "tags_max"), [(10_000, 1000), pytest.param(100_000, completion.TAGS_MAX, marks=pytest.mark.slow)]
)
def test_a_new_tag_for_every_op(monkeypatch: pytest.MonkeyPatch, tags: int, tags_max: int) -> None:
    monkeypatch.setattr(completion, "TAGS_MAX", tags_max)
    pair = Pair()
    epochs = set()
    for tag in range(tags):
        for peer in pair.peers.values():
            peer.launch(tag + 1, tag, 0.0)
        pair.settle()
        assert pair.results == {1: Result.SUCCESS, 2: Result.SUCCESS}, "nobody notices a new epoch"
        assert pair.submitted[1] == pair.submitted[2]
        pair.results.clear()
        epochs.add(pair.submitted[1][0])
        assert all(peer.ops.uses.tags <= tags_max for peer in pair.peers.values())
        assert pair.master.state.groups[0].ledger.tags <= tags_max
    assert len(epochs) >= tags // tags_max
