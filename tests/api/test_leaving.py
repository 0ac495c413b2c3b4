"""Who has left, and why: what the others are told."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from functools import partial

import pytest

from pccl import Communicator, MasterNode, PCCLError, Result
from pccl.runtime.session import session as peer_session
from tests.support.cluster import SUM, WAIT_S, Background, ones, refusal, run_of, until, waits_at_master


def _losses(peer: Communicator) -> dict[int, str]:
    return peer.losses


def test_who_leaves_says_why() -> None:
    with run_of(3) as cluster:
        going = cluster.peers.pop()
        number = going.membership.peers[going.membership.rank]
        ops = [Background(partial(peer.all_reduce, ones(), op=SUM)) for peer in cluster.peers]
        until(lambda: all(peer.stats["ops_open"] for peer in cluster.peers), "both are in the op")
        going.close(reason="its disk is full")
        for op, peer in zip(ops, cluster.peers, strict=True):
            error = op.outcome()
            assert isinstance(error, PCCLError)
            assert error.result is Result.RANK_CONNECTION_LOST
            assert "its disk is full" in str(error)
            assert until(partial(_losses, peer), "the loss is known") == {number: "left: its disk is full"}


def test_only_the_last_losses_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_session, "LOSSES_MAX", 2)
    with run_of(1) as cluster:
        for reason in ("first", "second", "third"):
            (going,) = cluster.join(1)
            cluster.peers.remove(going)
            going.close(reason=reason)
            until(lambda reason=reason: f"left: {reason}" in cluster[0].losses.values(), "the loss is known")
        assert list(cluster[0].losses.values()) == ["left: second", "left: third"]


def test_founders_begin_in_one_view() -> None:
    with MasterNode("127.0.0.1:0", founders=3) as master:
        peers = [Communicator(master.address) for _ in range(3)]
        connecting = [Background(peer.connect) for peer in peers[:2]]
        for peer in peers[:2]:
            until(partial(waits_at_master, peer), "it waits")
        assert not any(each.is_over for each in connecting)
        peers[2].connect()
        for each in connecting:
            each.result()
        assert [peer.world_size for peer in peers] == [3, 3, 3]
        for peer in peers:
            peer.close()


@pytest.mark.parametrize("founders", [0, -1, 10**6, 1.5])
def test_founders_are_a_number(founders: int) -> None:
    error = refusal(lambda: MasterNode("127.0.0.1:0", founders=founders))
    assert error.result is Result.INVALID_ARGUMENT
    assert "founders" in str(error)


def test_the_end_of_a_program_does_not_wait_for_a_daemon() -> None:
    program = """
        from pccl import Communicator, MasterNode
        master = MasterNode("127.0.0.1:0", daemon=True)
        master.run()
        Communicator(master.address).connect()
        print("ended")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, timeout=WAIT_S, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ended\n", "")
