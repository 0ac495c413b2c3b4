"""Peers that come back by themselves, older runs that newcomers refuse, and steps that wait for enough peers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pccl import Communicator, MasterNode, Result
from pccl.status import kick
from pccl.training import AsyncDiLoCo, DiLoCo
from pccl.training.group.membership import ADOPT, ADOPT_OWN, Row, common_history, unlike
from tests.support.cluster import Background, evict, refusal, together, until
from tests.training.peers import Peer, assert_parity, cluster_of, each_runs, new_model, refused_while_others_train
from tests.training.spsa.spsa_peers import SPSAPeer

MEMBERSHIP = "pccl.training.group.membership"

new_peers: dict[str, Any] = {
    "diloco": partial(Peer, kind=DiLoCo),
    "async": partial(Peer, kind=AsyncDiLoCo),
    "fragments": partial(Peer, kind=AsyncDiLoCo, fragments=2),
    "overlap": partial(Peer, kind=AsyncDiLoCo, fragments=2, overlap=1, inner_steps=2, mixing=0.5),
    "spsa": SPSAPeer,
}


def entered(kind: str, master: MasterNode, count: int, **options: Any) -> list[Any]:
    peers = [new_peers[kind](master.address, number, **options) for number in range(count)]
    together([partial(peer.enter, count) for peer in peers])
    return peers


def close(peers: list[Any]) -> None:
    together([peer.communicator.close for peer in peers])


def has_admitted_three_steps_ago(peer: Any) -> bool:
    return any(step.admitted for step in peer.steps[:-3])


# Coming back.


@pytest.mark.parametrize("kind", new_peers)
def test_evicted_peer_rejoins_with_the_same_communicator(
    master: MasterNode, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    peers = entered(kind, master, 2)
    stays, evicted = peers
    together([partial(peer.run, 3) for peer in peers])
    before = evicted.steps[-1].revision
    communicator = evicted.communicator
    evict(master, communicator)
    thread = Background(partial(stays.run, has_admitted_three_steps_ago))
    step = evicted.step()
    assert (step.rejoined, step.admitted, step.world_size, step.aborted) == (True, False, 0, 0)
    assert step.waited_s > 0
    assert step.revision >= before
    assert evicted.communicator is communicator
    assert communicator.world_size == 2
    count = len(evicted.steps)
    evicted.run(lambda peer: len(peer.steps) == count + 3)
    thread.result()
    assert not any(step.rejoined for step in [*stays.steps, *evicted.steps[count:]])
    assert_parity(peers)
    (line,) = (each.getMessage() for each in caplog.records if each.name == MEMBERSHIP)
    assert "this peer has rejoined after" in line
    assert "evicted: silent for 5.0 s" in line
    # An average that was in flight may have landed first.
    assert any(f"its work since revision {revision} is lost" in line for revision in (before, before + 1))
    assert f"continues at revision {step.revision} (world size 2)" in line
    close(peers)


@pytest.mark.parametrize("kind", new_peers)
def test_rejoin_can_be_disabled(master: MasterNode, kind: str) -> None:
    (peer,) = entered(kind, master, 1, rejoin=False)
    peer.run(2)
    evict(master, peer.communicator)
    error = refusal(peer.step)
    assert error.result is Result.MASTER_CONNECTION_FAILED
    assert "evicted: silent for 5.0 s; this communicator can connect() again" in str(error)
    assert error.func_name.endswith("step")


@pytest.mark.parametrize("kind", new_peers)
def test_kicked_peer_does_not_rejoin(master: MasterNode, kind: str) -> None:
    peers = entered(kind, master, 2)
    together([partial(peer.run, 2) for peer in peers])
    kick(master.address, peers[1].communicator.membership.peers[peers[1].communicator.rank])
    error = refusal(peers[1].step)
    assert error.result is Result.INVALID_USAGE
    assert "the operator has removed this peer" in str(error)
    assert error.func_name.endswith("step")
    peers[0].run(4)
    assert peers[0].communicator.world_size == 1
    close(peers)


def test_peer_evicted_while_it_waits_in_join_connects_again(master: MasterNode) -> None:
    first, second = (DiLoCo(Communicator(master.address), new_model()) for _ in range(2))
    first.connect()
    joining = Background(partial(first.join, 2))
    evict(master, first._communicator)
    second.connect()
    second.join(2)
    joining.result()
    together([first.outer_step, second.outer_step])
    assert first.digest() == second.digest()
    together([first._communicator.close, second._communicator.close])


def test_rejoining_is_bounded(master: MasterNode) -> None:
    (peer,) = cluster_of(master, 1, rejoin=0.2)
    master.interrupt()
    error = refusal(peer.step)
    assert error.result is Result.MASTER_CONNECTION_FAILED
    assert "it could not rejoin within" in str(error)
    assert not peer.communicator.is_connected


def test_peer_evicted_while_it_rejoins_tries_again(master: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = cluster_of(master, 2)
    stays, evicted = peers
    each_runs(peers, 2)
    connect = Communicator.connect
    evictions = iter([True, False])

    def connect_and_be_evicted(self: Communicator, **options: Any) -> None:
        connect(self, **options)
        if next(evictions):
            evict(master, self)

    monkeypatch.setattr(Communicator, "connect", connect_and_be_evicted)
    evict(master, evicted.communicator)
    thread = Background(partial(stays.run, lambda peer: peer.worlds[-1] == 2 and len(peer.worlds) > 3))
    assert evicted.step().rejoined
    evicted.step()
    thread.result()
    assert next(evictions, None) is None
    assert_parity(peers)
    close(peers)


# Older runs.

NEW = 10**6


def ahead(communicator: Communicator, folder: Path, **options: Any) -> DiLoCo:
    """A DiLoCo that has loaded a checkpoint newer than any run here."""
    saved = DiLoCo(Communicator(communicator._inner.address), new_model())
    saved.take_outer_state({**saved.outer_state(), "revision": NEW})
    saved.save(folder)
    found = DiLoCo(communicator, new_model(), **options)
    found.load(folder)
    assert found.revision == NEW
    return found


def test_newer_checkpoint_does_not_join_an_older_run(master: MasterNode, tmp_path: Path) -> None:
    peers = cluster_of(master, 2)
    error = refused_while_others_train(master, peers, partial(ahead, folder=tmp_path))
    assert error.result is Result.INVALID_ARGUMENT
    assert f"this peer has revision {NEW}, but the run of peer " in str(error)
    assert "is at revision " in str(error)
    assert 'on_older_run="adopt"' in str(error)


def test_older_run_can_be_adopted(master: MasterNode, tmp_path: Path) -> None:
    peers = cluster_of(master, 2)
    threads = [Background(partial(peer.run, has_admitted_three_steps_ago)) for peer in peers]
    newcomer = Peer(master.address, 2)
    newcomer.diloco = ahead(newcomer.communicator, tmp_path, on_older_run="adopt")
    newcomer.model = newcomer.diloco._model  # type: ignore[assignment]
    newcomer.enter()
    assert newcomer.diloco.revision < NEW
    newcomer.run(lambda peer: len(peer.steps) == 3)
    for thread in threads:
        thread.result()
    assert_parity([*peers, newcomer])
    assert len({peer.diloco._replicated.history for peer in [*peers, newcomer]}) == 1
    newcomer.diloco.save(tmp_path, keep=1)
    assert f"step-{NEW:09d}.safetensors" in {path.name for path in tmp_path.iterdir()}
    close([*peers, newcomer])


def test_peers_of_a_new_run_share_its_history(master: MasterNode, tmp_path: Path) -> None:
    peers = cluster_of(master, 2)
    each_runs(peers, 1)
    assert len({peer.diloco._replicated.history for peer in peers}) == 1
    peers[0].diloco.save(tmp_path)
    again = DiLoCo(peers[0].communicator, new_model())
    again.load(tmp_path)
    assert again._replicated.history == peers[0].diloco._replicated.history
    close(peers)


def test_which_newcomers_are_refused() -> None:
    run = Row(1, True, 1, "", revision=20, history=7)
    older, equal = Row(2, False, 1, "", 19, 8), Row(3, False, 1, "", 20, 8)
    refused, back = Row(4, False, 1, "", 21, 7), Row(5, False, 1, "", 21, 7, ADOPT_OWN)
    other, adopts = Row(6, False, 1, "", 21, 8, ADOPT_OWN), Row(7, False, 1, "", 21, 8, ADOPT)
    found = unlike([run, older, equal, refused, back, other, adopts], run)
    assert sorted(found) == [4, 6]
    assert found[4].startswith("peer 4 has revision 21, but the run of this peer is at revision 20, and ")
    assert not unlike([refused, Row(8, False, 1, "", 60, 9)], refused)  # they start a run, and the newest wins


def test_history_of_a_run() -> None:
    run, newcomer = Row(1, True, 1, "", 20, 7), Row(2, False, 1, "", 30, 8, ADOPT)
    assert common_history([run, newcomer]) == 7
    forked = common_history([run, Row(2, False, 1, "", 30, 7, ADOPT)])
    assert forked not in (7, 8)
    assert common_history([run, Row(2, False, 1, "", 21, 7, ADOPT_OWN)]) == 7
    assert common_history([Row(1, False, 1, "", 5, 7), Row(2, False, 1, "", 6, 8), Row(3, False, 1, "", 6, 9)]) == 8


# Enough peers.


@pytest.mark.parametrize("kind", new_peers)
def test_steps_wait_for_enough_peers(
    master: MasterNode, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pccl.protocol.wait_reasons.FIRST_S", 0.01)
    peers = entered(kind, master, 3, hold_below=3)
    together([partial(peer.run, 4) for peer in peers])
    leaver = peers.pop()
    leaver.communicator.close()
    threads = [Background(partial(peer.run, has_admitted_three_steps_ago)) for peer in peers]
    waits = r"step has waited \d+ s for more peers: 2 of 3 are present"
    until(lambda: re.search(waits, caplog.text), "the warning")
    newcomer = new_peers[kind](master.address, 2, hold_below=3)
    newcomer.enter()
    newcomer.run(lambda peer: len(peer.steps) == 3)
    for thread in threads:
        thread.result()
    assert_parity([*peers, newcomer])
    for peer in peers:
        short = [step.revision for step in peer.steps if step.world_size == 2]
        assert len(short) <= (1 if kind in ("diloco", "spsa") else 3), peer.steps
    close([*peers, newcomer])


def test_newcomers_wait_for_enough_peers_too(master: MasterNode) -> None:
    peers = cluster_of(master, 1, hold_below=1)
    close(peers)
    peers = [Peer(master.address, number, hold_below=3) for number in range(3)]
    together([peer.enter for peer in peers])  # although `join` names no number
    each_runs(peers, 3)
    assert all(peer.worlds == [3, 3, 3] for peer in peers)
    assert_parity(peers)
    close(peers)


def test_different_minimum_is_refused(master: MasterNode) -> None:
    peers = cluster_of(master, 2, hold_below=2)
    error = refused_while_others_train(master, peers, lambda comm: DiLoCo(comm, new_model()))
    assert "has no hold_below, but peer 1 has hold_below=2" in str(error)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rejoin": -1}, "rejoin -1: must be True, False or a number of seconds"),
        ({"rejoin": "yes"}, "rejoin 'yes': must be"),
        ({"hold_below": 0}, "hold_below 0 is not an integer of at least 1"),
        ({"on_older_run": "ask"}, "on_older_run 'ask': must be"),
    ],
)
def test_invalid_options(master: MasterNode, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        DiLoCo(Communicator(master.address), new_model(), **options)


def test_unknown_option_is_a_type_error(master: MasterNode) -> None:
    unknown: Any = {"inner_step": 3}
    with pytest.raises(TypeError, match="inner_step"):
        DiLoCo(Communicator(master.address), new_model(), **unknown)


def test_warnings_need_no_configuration(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
import numpy as np
from pccl import Communicator
from pccl.training import DiLoCo
diloco = DiLoCo(Communicator("127.0.0.1:1"), {"weights": np.zeros(3)})
for revision in (7, 3):
    diloco.take_outer_state({**diloco.outer_state(), "revision": revision})
    diloco.save(Path(sys.argv[1]))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PCCL_LOG")}
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "holds checkpoints newer than revision 3, and load would choose revision 7" in done.stderr
