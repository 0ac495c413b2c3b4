"""What a signal handler raises comes out of the training classes as it is, also where they expect its type."""

from __future__ import annotations

import itertools
import zipfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, MasterNode, PCCLError, Result, SharedState
from pccl.training import DiLoCo
from pccl.training.diloco.weighted_average import Notes
from pccl.training.group.membership import Average, Membership
from pccl.training.group.relaunch import Relaunched
from pccl.training.group.seats import until_committed
from pccl.training.group.weights import as_float, checked_weight
from pccl.training.spsa.step_log import LogFile
from pccl.training.state import codec, tensor_file
from pccl.training.tensors import npz
from tests.support.cluster import together
from tests.support.interrupts import AlarmError, refused
from tests.support.ringing import Ring, ringing
from tests.training.peers import Peer, cluster_of, each_runs

VALUES = np.arange(4, dtype=np.float32)


def failure_of(result: Result) -> PCCLError:
    return PCCLError(result, "a call", "made by a signal handler")


def of_two(**calls: Any) -> Any:
    """Return a communicator of a group of two."""
    return SimpleNamespace(world_size=2, **calls)


@pytest.mark.parametrize("place", ["arrays_of", "zipfile.ZipFile"])
@pytest.mark.parametrize("error", [AlarmError("of the program"), KeyError("of the program")], ids=repr)
def test_an_npz_is_not_damaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str, error: Exception) -> None:
    path = tmp_path / "state.npz"
    np.savez(path, values=VALUES)
    with ringing(error) as ring:
        monkeypatch.setattr(f"pccl.training.state.tensor_file.{place}", ring)
        tensor_file.read(path)
    assert zipfile.is_zipfile(path)


def test_an_npz_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    with ringing(SystemError("of the program")) as ring:
        monkeypatch.setattr(npz, "_arrays_of", lambda content: ring(calls.append(content)))
        npz.arrays_of(b"")
    assert len(calls) == 1


def test_a_checkpoint_is_neither_damaged_nor_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    diloco = DiLoCo(Communicator("127.0.0.1:1"), {"values": VALUES.copy()})
    diloco.save(tmp_path / "state.safetensors")
    place = "pccl.training.state.checkpointed"
    for stubbed, error in itertools.product(("load", "Piece"), (AlarmError("of the program"), FileNotFoundError())):
        with ringing(error) as ring, monkeypatch.context() as patched:
            patched.setattr(f"{place}.{stubbed}", ring)
            diloco.load(tmp_path / "state.safetensors", missing_ok=True)
    with ringing(AlarmError("of the program")) as ring, monkeypatch.context() as patched:
        patched.setattr("pccl.training.state.tensor_file.json.loads", ring)
        diloco.load(tmp_path / "state.safetensors")
    assert diloco.load(tmp_path / "state.safetensors")


def test_a_rank_of_a_site_does_not_tell_the_others_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    diloco = DiLoCo(Communicator("127.0.0.1:1"), {"values": VALUES.copy()})
    diloco.save(tmp_path / "state.safetensors")
    told: list[str] = []
    diloco._site = SimpleNamespace(rank=0, size=1, gather=lambda text: [told.append(text) or text])  # type: ignore
    with ringing(AlarmError("of the program")) as ring:
        monkeypatch.setattr("pccl.training.state.checkpointed.load", ring)
        diloco._loaded(SimpleNamespace(path=tmp_path / "state.safetensors"))  # type: ignore[arg-type]
    assert not told


def test_an_encoded_state_is_not_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = codec.encode({"values": VALUES})
    for stubbed in ("msgpack.unpackb", "_state"):
        with ringing(AlarmError("of the program")) as ring, monkeypatch.context() as patched:
            patched.setattr(f"pccl.training.state.codec.{stubbed}", ring)
            codec.decode(encoded)


def test_a_log_is_nobody_elses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with ringing(AlarmError("of the program")) as ring:
        monkeypatch.setattr("pccl.training.spsa.step_log.fcntl.flock", ring)
        LogFile(tmp_path / "log")


def test_a_weight_is_no_wrong_number() -> None:
    class Number:
        def __init__(self, ring: Ring) -> None:
            self._ring = ring

        def __float__(self) -> float:
            self._ring()
            return 1.0

    with ringing(AlarmError("of the program")) as ring:
        checked_weight(Number(ring))
    with ringing(AlarmError("of the program")) as ring:
        as_float("momentum", Number(ring))


def test_who_launches_is_not_alone() -> None:
    error = failure_of(Result.TOO_FEW_PEERS)
    with ringing(error) as ring:
        Relaunched(of_two(), ring)
    with ringing(error) as ring:
        Notes(of_two(all_gather_async=ring), [1.0], 0, 0)
    with ringing(error) as ring:
        Average(of_two(all_reduce_async=ring), VALUES, 0, 0)


def test_a_call_is_not_made_again() -> None:
    with ringing(failure_of(Result.RANK_CONNECTION_LOST)) as ring:
        until_committed(of_two(), ring)


def test_newcomers_are_not_brought_up_again() -> None:
    state = SharedState.from_numpy({"values": VALUES.copy()})
    with ringing(failure_of(Result.INVALID_ARGUMENT)) as ring:
        membership = Membership(of_two(sync_shared_state=ring), state)
        membership.is_under_way = True
        membership._admission(2)


@pytest.mark.parametrize("result", [Result.TIMEOUT, Result.TOO_FEW_PEERS, Result.RANK_CONNECTION_LOST])
def test_a_run_that_ends_is_not_merely_uncompared(
    master: MasterNode, monkeypatch: pytest.MonkeyPatch, result: Result
) -> None:
    peers = cluster_of(master, 2)
    each_runs(peers, 3)
    with ringing(failure_of(result)) as ring:
        monkeypatch.setattr(peers[0].communicator, "all_reduce", ring)
        peers[0].communicator.__exit__(None, None, None)
    monkeypatch.undo()
    together([partial(Peer.close, peer) for peer in peers])


def test_a_joined_object_is_not_taken_for_one_that_has_left(
    master: MasterNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    (peer,) = cluster_of(master, 1)
    for call in (peer.diloco._membership.part, peer.diloco._require_not_joined):
        with ringing(refused()) as ring, monkeypatch.context() as patched:
            patched.setattr(Communicator, "world_size", property(ring))
            call()
    peer.close()
