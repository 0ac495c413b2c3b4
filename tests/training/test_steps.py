"""A peer that makes a step once more, not knowing that the others have it, does not meet their next one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from pccl import MasterNode, PCCLError, Result
from pccl.training import AsyncDiLoCo, DiLoCo
from tests.support.cluster import outcomes, results, together
from tests.training.peers import Peer, cluster_of
from tests.training.spsa.spsa_peers import SPSAPeer, spsa_cluster

BEFORE = 3
"""Steps that all have made."""


def all_are_told(error: PCCLError) -> None:
    assert error.result is Result.INVALID_ARGUMENT
    for step in (BEFORE - 1, BEFORE):
        assert f"step {step}" in str(error), str(error)
    assert "missed or repeated a step" in str(error)


def fail_together(calls: list[Callable[[], Any]]) -> None:
    found = outcomes(calls)
    assert results(found) == [Result.INVALID_ARGUMENT] * len(calls), found
    for error in found:
        all_are_told(error)


def set_back(state_of: Any) -> None:
    """Set a peer back to before its last step, as if the verdict had not arrived."""
    state_of._state.revision -= 1


@pytest.mark.parametrize("kind", [DiLoCo, AsyncDiLoCo, partial(AsyncDiLoCo, fragments=3)])
def test_outer_steps_do_not_mix(master: MasterNode, kind: Any) -> None:
    peers: list[Peer] = cluster_of(master, 3, kind)
    together([partial(peer.run, BEFORE) for peer in peers])
    set_back(peers[1].diloco)
    if kind is DiLoCo:
        before = [peer.diloco.digest() for peer in peers]
        fail_together([peer.step for peer in peers])
        assert [peer.diloco.digest() for peer in peers] == before
    else:
        # The average that is in flight was launched by all alike; the next one is not.
        together([peer.step for peer in peers])
        found = outcomes([peer.diloco.outer_step for peer in peers])
        assert results(found) == [Result.INVALID_ARGUMENT] * 3
        assert all("missed or repeated a step" in str(error) for error in found)
    together([peer.close for peer in peers])


def test_exchanges_of_steps_do_not_mix(master: MasterNode) -> None:
    peers: list[SPSAPeer] = spsa_cluster(master, 3, admit_every=100)
    together([partial(peer.run, BEFORE) for peer in peers])
    set_back(peers[2].spsa)
    before = [{name: np.array(array) for name, array in peer.model.items()} for peer in peers]
    fail_together([partial(peer.spsa.step, lambda _: 1.0) for peer in peers])
    for peer, model in zip(peers, before, strict=True):
        assert all(np.array_equal(peer.model[name], array) for name, array in model.items())
    together([peer.communicator.close for peer in peers])


def test_gradients_of_steps_do_not_mix(master: MasterNode) -> None:
    pytest.importorskip("torch")
    from tests.training import test_ddp_torch as ddp_torch

    peers = ddp_torch.cluster_of(master, 2, admit_every=100)
    together([partial(peer.run, BEFORE) for peer in peers])
    set_back(peers[0].ddp)
    before = [ddp_torch.parameters(peer.module).clone() for peer in peers]
    fail_together([partial(peer.run, BEFORE + 1) for peer in peers])
    assert all(bool((ddp_torch.parameters(p.module) == b).all()) for p, b in zip(peers, before, strict=True))
    ddp_torch.close(peers)
