"""Ctrl-C in the middle of a step: the others go on, and the interrupted peer has to join again."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from pccl import Communicator, MasterNode, Result
from pccl.training import AsyncDiLoCo, DiLoCo
from tests.support.cluster import Background, refusal, together
from tests.support.interrupts import KINDS, interrupted_at
from tests.training.peers import Peer, assert_parity
from tests.training.spsa.spsa_peers import SPSAPeer

ASLEEP = 10**9
"""A step that no call comes to before it sleeps."""

new_peers = {"diloco": partial(Peer, kind=DiLoCo), "async": partial(Peer, kind=AsyncDiLoCo), "spsa": SPSAPeer}


def loop_of(peer: Any) -> Any:
    return peer.spsa if isinstance(peer, SPSAPeer) else peer.diloco


def has_admitted_three_steps_ago(peer: Any) -> bool:
    return [step.admitted for step in peer.steps][-4:] == [True, False, False, False]


@pytest.mark.parametrize("kind", new_peers)
def test_interrupted_peer_rejoins(master: MasterNode, kind: str) -> None:
    peers = [new_peers[kind](master.address, number) for number in range(2)]
    together([partial(peer.enter, 2) for peer in peers])
    together([partial(peer.run, 3) for peer in peers])
    stays, interrupted = peers
    assert interrupted_at(ASLEEP, interrupted.step, KINDS["interrupt"])
    error = refusal(interrupted.step)
    assert error.result is Result.INVALID_USAGE
    assert "an earlier call was interrupted" in str(error)
    thread = Background(partial(stays.run, has_admitted_three_steps_ago))
    interrupted.communicator.close()
    interrupted.communicator = Communicator(master.address)
    interrupted.communicator.connect()
    loop_of(interrupted).reconnect(interrupted.communicator)
    before = len(interrupted.steps)
    interrupted.run(lambda peer: len(peer.steps) == before + 3)
    thread.result()
    assert_parity(peers)
    together([peer.communicator.close for peer in peers])
