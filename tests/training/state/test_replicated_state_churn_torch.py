"""Everything that peers have in common is the same after every step, while some are killed and others join."""

from __future__ import annotations

import random
import re
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from pccl import MasterNode
from tests.support.cluster import Background, together
from tests.support.streams import TIMEOUT_S
from tests.training.peer_process import PeerProcess, started
from tests.training.peers import assert_parity
from tests.training.state.replicated_peers import KINDS, ReplicatedPeer

torch = pytest.importorskip("torch")

MODULE = "tests.training.state.replicated_process"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_kills_keep_replicas_identical(master: MasterNode, kind: str, tmp_path: Path) -> None:
    """Two at once; a newcomer while it is brought up; again, three times."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choice = random.Random(seed)
    stop = tmp_path / "stop"
    with ExitStack() as stack:

        def start(number: int, *end_s: float) -> PeerProcess:
            return stack.enter_context(started(kind, master, number, stop, *end_s, module=MODULE))

        everybody = [start(number) for number in range(4)]
        living = list(everybody)
        for round_ in range(3):
            living[-1].lines.expect(r"\d+ \d+ 4 .*")
            victims = [living.pop(choice.randrange(len(living))) for _ in range(2)]
            victims[0].kill_within(choice.uniform(0, 0.1))
            victims[1].kill_within(0)
            doomed = start(90 + round_, choice.uniform(0, 0.03))
            everybody.append(doomed)
            newcomers = [start(10 * (round_ + 1) + i) for i in range(2)]
            everybody += newcomers
            living += newcomers
            doomed.process.wait(TIMEOUT_S)
        living[-1].lines.expect(r"\d+ \d+ 4 .*")
        stop.touch()
        for peer in living:
            assert peer.process.wait(TIMEOUT_S) == 0
        digests: dict[str, set[str]] = {}
        for peer in everybody:
            for line in peer.lines.rest():
                match = re.fullmatch(r"(\d+ \d+) \d ([0-9a-f]{64})", line)
                assert match is not None, line
                digests.setdefault(match[1], set()).add(match[2])
    assert {state: found for state, found in digests.items() if len(found) > 1} == {}
    assert len({peer.lines.seen[-1] for peer in living}) == 1


class DeathError(Exception):
    pass


@pytest.mark.parametrize("kind", KINDS)
def test_newcomer_lost_during_sync(master: MasterNode, kind: str) -> None:
    """When it has the shared state, and before it has the objects."""

    def run(peer: ReplicatedPeer) -> None:
        is_let_in = False
        while not is_let_in:
            is_let_in = peer.step().admitted  # the same on all
        peer.run(peer.training.revision + 3)

    def die(*_: object, **__: object) -> None:
        newcomer.communicator.close()
        raise DeathError

    peers = [ReplicatedPeer(torch, master.address, number, kind) for number in range(2)]
    together([partial(peer.enter, 2) for peer in peers])
    newcomer = ReplicatedPeer(torch, master.address, 2, kind)
    newcomer.training._replicated.after_admission = die
    threads = [Background(partial(run, peer)) for peer in peers]
    with pytest.raises(DeathError):
        newcomer.enter()
    for thread in threads:
        thread.result()
    assert_parity(peers)
    assert {peer.worlds[-1] for peer in peers} == {2}
    together([peer.close for peer in peers])


@pytest.mark.parametrize("kind", KINDS)
def test_master_failover_during_step(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_MASTER_TIMEOUT", "60")
    with MasterNode("127.0.0.1:0") as first:
        address = first.address
        peers = [ReplicatedPeer(torch, address, number, kind) for number in range(3)]
        together([partial(peer.enter, 3) for peer in peers])
        together([partial(peer.run, 2) for peer in peers])
        threads = [Background(partial(peer.run, 40)) for peer in peers]
    with MasterNode(address):
        for thread in threads:
            thread.result()
        assert_parity(peers)
        assert {peer.training.revision for peer in peers} == {40}
        together([peer.close for peer in peers])
