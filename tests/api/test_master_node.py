"""A master inside a process: starting, stopping, addresses."""

from __future__ import annotations

import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pccl import Communicator, MasterNode, PCCLError, Result
from pccl.protocol.failover.durable_state import RecordedView, RunRecord
from pccl.protocol.status import Finding
from pccl.protocol.stragglers import Stragglers
from pccl.runtime.master import server
from pccl.runtime.master.durable_state import StateDirectory
from pccl.runtime.session import control
from pccl.status import run_status
from tests.support.cluster import WAIT_S, Background, Cluster, outcomes, results, until


def refusal(call: Any) -> PCCLError:
    with pytest.raises(PCCLError) as caught:
        call()
    return caught.value


def test_run_and_interrupt() -> None:
    master = MasterNode("127.0.0.1:0")
    master.run()
    assert master.wait(0) is False
    cluster = Cluster(master.address)
    cluster.join(2)
    master.interrupt()
    assert master.wait(WAIT_S)
    until(
        lambda: results(outcomes([cluster[0].are_peers_pending])) == [Result.MASTER_CONNECTION_FAILED], "it is missed"
    )
    master.interrupt()
    assert master.wait()
    cluster.close_all()


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), 1e6])
def test_peer_timeout_must_be_a_number(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(lambda: MasterNode("127.0.0.1:0", peer_timeout=value))
    assert error.result is Result.INVALID_ARGUMENT
    assert f"peer_timeout '{value}'" in str(error)
    monkeypatch.setenv("PCCL_PEER_TIMEOUT", str(value))
    assert f"PCCL_PEER_TIMEOUT '{value}'" in str(refusal(lambda: MasterNode("127.0.0.1:0")))


@pytest.mark.parametrize(("argument", "variable", "told"), [(None, "", 5.0), (None, "7.5", 7.5), (3, "7.5", 3.0)])
def test_peer_timeout_reaches_the_peers(
    argument: float | None, variable: str, told: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PCCL_PEER_TIMEOUT", variable)
    with MasterNode("127.0.0.1:0", peer_timeout=argument) as node, Communicator(node.address) as peer:
        session = peer._inner._session
        assert session is not None
        assert session._machine.peer_timeout_s == told


def test_next_master_at_the_address_continues_the_run() -> None:
    with MasterNode("127.0.0.1:0") as first:
        address = first.address
        peer = Communicator(address, master_timeout=30)
        peer.connect()
    with MasterNode(address), peer:
        assert peer.are_peers_pending() is False


def test_peers_give_up_if_the_record_and_one_of_them_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A master without the record continues with all peers of the last view only, and one of them never comes back."""
    monkeypatch.setenv("PCCL_PEER_TIMEOUT", "0.3")
    monkeypatch.setattr(control, "LEAD_TIMEOUTS", 10.0)  # much longer than a master keeps peers that wait
    with MasterNode("127.0.0.1:0") as first:
        cluster = Cluster(first.address, master_timeout=1.0)
        cluster.join(3)
    gone, *survivors = cluster.peers
    gone.close()
    with MasterNode(first.address) as second:
        found = outcomes([survivor.update_topology for survivor in survivors])
        assert results(found) == [Result.MASTER_CONNECTION_FAILED] * 2
        with Communicator(second.address) as founder:  # a new run can begin
            assert founder.world_size == 1


def test_state_directory_continues_the_run(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with MasterNode("127.0.0.1:0", state=state) as first:
        address = first.address
        peer = Communicator(address, master_timeout=30)
        peer.connect()
        refused = refusal(MasterNode("127.0.0.1:0", state=state).run)
        assert refused.result is Result.INVALID_ARGUMENT
        assert f"{state} is in use by the master at {address}" in str(refused)
    with MasterNode(address, state=state), peer:
        assert peer.are_peers_pending() is False
        peer.close()
    with MasterNode("127.0.0.1:0", state=state) as third, Communicator(third.address) as founder:
        assert founder.world_size == 1


def test_state_is_written_before_peers_are_admitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_written, write = threading.Event(), StateDirectory.write
    tried: list[RunRecord] = []

    def late(self: StateDirectory, record: RunRecord) -> None:
        tried.append(record)
        if not is_written.is_set():
            raise OSError(28, "No space left on device")
        write(self, record)

    monkeypatch.setattr(StateDirectory, "write", late)
    monkeypatch.setattr("pccl.runtime.master.durable_state.WRITE_AGAIN_S", 0.01)
    with MasterNode("127.0.0.1:0", state=tmp_path) as node:
        peer = Communicator(node.address)
        connecting = Background(peer.connect)
        until(lambda: len(tried) >= 3, "it is tried again")
        assert [member.state for member in run_status(node.address).members] != ["accepted"]
        assert not connecting.is_over
        is_written.set()
        connecting.outcome()
        assert peer.world_size == 1
        peer.close()


def test_recorded_run_holds_newcomers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pccl.protocol.failover.bootstrap.HOLD_S", 0.1)
    state = StateDirectory(str(tmp_path), "before")
    state.write(RunRecord("run", b"secret", 1, RecordedView.of(3, [1, 2])))
    state.close()
    with MasterNode("127.0.0.1:0", state=tmp_path) as node:
        error = refusal(partial(Communicator(node.address, master_timeout=0.1).connect, n_attempts=1))
        assert "it waits for the peers of run run in term 1, view 3, peers [1, 2]" in str(error)
    with MasterNode("127.0.0.1:0", state=tmp_path, start="new") as node, Communicator(node.address) as founder:
        assert founder.world_size == 1


def test_unknown_start_is_refused() -> None:
    error = refusal(partial(MasterNode, "127.0.0.1:0", start="again"))
    assert error.result is Result.INVALID_ARGUMENT


def test_port_of_another_master_is_refused() -> None:
    with MasterNode("127.0.0.1:0") as master:
        error = refusal(MasterNode(master.address).run)
        assert (error.result, error.func_name) == (Result.INVALID_ARGUMENT, "MasterNode.run")
        assert f"cannot listen on {master.address}: the port is in use" in str(error)
        assert refusal(master.run).result is Result.INVALID_USAGE


@pytest.mark.parametrize("address", ["127.0.0.1:x", ":1", "[::1", "127.0.0.1:70000"])
def test_wrong_addresses(address: str) -> None:
    error = refusal(partial(MasterNode, address))
    assert error.result is Result.INVALID_ARGUMENT
    assert repr(address) in str(error)


@pytest.mark.parametrize("host", ["192.0.2.1", "host.invalid"])
def test_address_of_another_machine(host: str) -> None:
    error = refusal(MasterNode(f"{host}:0").run)
    assert error.result is Result.INVALID_ARGUMENT
    assert f"cannot listen on {host}:0" in str(error)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "localhost"])
def test_listen_on_any_address(host: str) -> None:
    if host == "[::]" and not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    with MasterNode(f"{host}:0") as master:
        assert master.address.startswith(f"{host}:")
        with Communicator(f"localhost:{master.address.rpartition(':')[2]}") as peer:
            assert peer.world_size == 1


def test_straggler_is_logged_as_a_warning(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    found = [Finding("straggler", 2, 0, "peer 2 straggles")]
    monkeypatch.setattr(server, "STRAGGLERS_S", 0.01)
    monkeypatch.setattr(Stragglers, "judge", lambda *_: ([found.pop()] if found else [], []))
    with MasterNode("127.0.0.1:0") as node, Communicator(node.address):
        until(lambda: "peer 2 straggles" in caplog.messages, "it is logged")
    (record,) = [record for record in caplog.records if record.getMessage() == "peer 2 straggles"]
    assert record.levelname == "WARNING"


def test_fixed_port_has_default_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nobody: str) -> None:
    monkeypatch.delenv("PCCL_STATE")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with MasterNode(nobody) as node, Communicator(node.address) as peer:
        assert peer.world_size == 1
    (directory,) = (tmp_path / "pccl").iterdir()
    assert directory.name == f"master-{socket.gethostname()}-{nobody.rpartition(':')[2]}"
    assert (directory / "master.json").exists()


def test_run_name_refuses_a_peer_of_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with MasterNode("127.0.0.1:0", run_name="b") as master:
        monkeypatch.setenv("PCCL_RUN", "a")
        error = refusal(Communicator(master.address).connect)
        assert error.result is Result.MASTER_CONNECTION_FAILED
        assert "serves run 'b', but this peer belongs to run 'a'" in str(error)
        for name in ("", "b"):
            monkeypatch.setenv("PCCL_RUN", name)
            with Communicator(master.address):
                assert run_status(master.address).run_name == "b"
        monkeypatch.setenv("PCCL_RUN", "a\nb")
        assert refusal(lambda: Communicator(master.address)).result is Result.INVALID_ARGUMENT
