"""The end of a run: what the last step has left is compared by `finish`, or as the communicator is left in order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest

from pccl import MasterNode
from pccl.training import DDP, DivergenceError
from pccl.training.state import replicated_state
from tests.support.cluster import Background, together
from tests.training.state.replicated_peers import KINDS, ReplicatedPeer, new_module
from tests.training.state.test_replicated_state_torch import close, cluster_of, diverge

torch = pytest.importorskip("torch")

NEVER = 2**40


def make_a_last_step(peer: ReplicatedPeer, parts: bool) -> None:
    peer.run(2)
    if parts:
        diverge(peer)
    peer.step()


def leave_in_order(peer: ReplicatedPeer, work: Callable[[], object]) -> None:
    with peer.communicator:
        work()


def number_of(peer: ReplicatedPeer) -> int:
    membership = peer.communicator.membership
    return membership.peers[membership.rank]


def divergence(call: Callable[[], object]) -> DivergenceError:
    with pytest.raises(DivergenceError) as caught:
        call()
    return caught.value


def errors_of(peers: list[ReplicatedPeer], end: Callable[[ReplicatedPeer, Callable[[], object]], object]) -> None:
    """All have the same error of a last step that the second of them makes otherwise."""
    number = number_of(peers[1])
    works = [partial(make_a_last_step, peer, peer is peers[1]) for peer in peers]
    calls = [partial(divergence, partial(end, peer, work)) for peer, work in zip(peers, works, strict=True)]
    errors = together(calls)
    assert [error.peers for error in errors] == [(number,)] * len(peers)
    assert {error.revision for error in errors} == {peers[0].training.revision}


@pytest.mark.parametrize(("kind", "check_every"), [("ddp", 1), *((kind, NEVER) for kind in KINDS)])
def test_divergent_last_step_is_raised_on_leaving(master: MasterNode, kind: str, check_every: int) -> None:
    peers = cluster_of(master, kind, 3, check_every=check_every)
    errors_of(peers, leave_in_order)
    assert all(not peer.communicator._inner.is_connected for peer in peers)


@pytest.mark.parametrize("kind", KINDS)
def test_divergent_last_step_is_raised_by_finish(master: MasterNode, kind: str) -> None:
    def end(peer: ReplicatedPeer, work: Callable[[], object]) -> None:
        work()
        peer.training.finish()

    peers = cluster_of(master, kind, 3, check_every=NEVER)
    errors_of(peers, end)
    close(peers)


def test_early_leaver_compares_with_remaining_peers(master: MasterNode) -> None:
    peers = cluster_of(master, "ddp", 3, check_every=1)
    first, *others = peers
    threads = [Background(partial(peer.run, 6)) for peer in others]
    leave_in_order(first, partial(first.run, 3))
    for thread in threads:
        thread.result()
    assert others[0].worlds == [3, 3, 3, 2, 2, 2]
    close(others)


def test_final_comparison_timeout_is_logged(
    master: MasterNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replicated_state, "PARTING_S", 0.2)
    peers = cluster_of(master, "sync", 2, check_every=NEVER)
    with caplog.at_level(logging.WARNING):
        together([partial(peer.run, 2) for peer in peers])
        leave_in_order(peers[0], bool)
    (record,) = [record for record in caplog.records if "revision 2, was not compared" in record.message]
    assert "Call finish() on all peers after the last step" in record.message
    peers[1].run(4)
    assert peers[1].worlds == [2, 2, 1, 1]
    leave_in_order(peers[1], bool)  # alone


def test_exception_skips_final_comparison(master: MasterNode) -> None:
    peers = cluster_of(master, "ddp", 2)
    together([partial(peer.run, 2) for peer in peers])
    with pytest.raises(ZeroDivisionError):
        leave_in_order(peers[0], lambda: 1 / 0)
    peers[1].run(3)
    assert peers[1].worlds[-1] == 1
    close(peers[1:])


def stepped(address: str, parts: bool) -> DDP:
    """One of `connect` that has made a step."""
    module = new_module(torch)
    ddp = DDP.connect(module, torch.optim.SGD(module.parameters(), lr=0.1), address, peers_min=2)
    if parts:
        module[0].weight.data.add_(1)
    module(torch.ones(4, 6)).sum().backward()
    ddp.step()
    return ddp


def test_close_of_connected_ddp_compares(master: MasterNode) -> None:
    def run(parts: bool) -> bool:
        ddp = stepped(master.address, parts)
        with pytest.raises(DivergenceError, match=r"after 1 steps .* in parameter 0\.weight"):
            ddp.close()
        return ddp._communicator._inner.is_connected

    assert together([partial(run, parts) for parts in (False, True)]) == [False, False]
