"""`pccl status` and the function behind it."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console

from pccl import Communicator, MasterNode, PCCLError, ReduceOp, Result, UsageError
from pccl.cli.status_table import render, span
from pccl.protocol import messages as m
from pccl.protocol.codec import Decoder, encode
from pccl.runtime.master import server
from pccl.runtime.network import clients
from pccl.status import (
    Course,
    Event,
    Finding,
    GroupStatus,
    LinkTraffic,
    Loss,
    MemberStatus,
    PeerTraffic,
    RunStatus,
    Totals,
    Waiting,
    kick,
    run_status,
)
from pccl.training import DiLoCo
from pccl.web.prometheus import exposition
from tests.conftest import Command
from tests.support.cluster import Background, Cluster, refusal, together, until

TIMEOUT_S = 60.0
CERTIFICATES = Path(__file__).parents[1] / "certificates"


@pytest.fixture
def pccl_status(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        with monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("PCCL_")]:
                patch.delenv(name)
            for name, value in {"COLUMNS": "160", **environment}.items():
                patch.setenv(name, value)
            return command("status", *arguments)

    return run


@pytest.mark.usefixtures("reported_at_once")
def test_json_of_a_run(cluster: Cluster, pccl_status: Command) -> None:
    cluster.join(3)
    cluster.each(lambda peer, i: peer.all_reduce(np.ones(10, np.float32), op=ReduceOp.SUM))
    until(lambda: run_status(cluster.address).totals.ops_committed, "the op is reported")
    done = pccl_status(cluster.address, "--json")
    assert done.returncode == 0, done.stderr
    status = json.loads(done.stdout)
    assert [member["state"] for member in status["members"]] == ["accepted"] * 3
    assert status["groups"][0]["ring"] == [member["peer"] for member in status["members"]]
    assert (status["totals"]["ops_committed"], status["totals"]["joins"]) == (1, 3)


def test_table_of_a_run(cluster: Cluster, pccl_status: Command) -> None:
    cluster.join(2)
    cluster.close(cluster[1])
    done = pccl_status(PCCL_MASTER=cluster.address)
    assert done.returncode == 0, done.stderr
    assert "1 peers, 0 waiting" in done.stdout
    assert "1 left" in done.stdout
    assert "view 3" in done.stdout
    assert "peer 2" in done.stdout


@pytest.mark.usefixtures("reported_at_once")
def test_held_newcomers_are_shown(pccl_status: Command, nobody: str) -> None:
    with MasterNode(nobody):
        newcomer = Communicator(nobody)
        connecting = Background(newcomer.connect)
        shown = until(
            lambda: found if "1 waiting" in (found := pccl_status(nobody).stdout) else "", "a newcomer is shown"
        )
        assert "vacant" in shown
        assert "0 peers, 1 waiting" in shown
        assert "newcomers are held: this master waits for peers of an earlier run, if any, for " in shown
        assert "`pccl master --start new` skips this" in shown
        newcomer.close()
        assert connecting.outcome().result is Result.NOT_INITIALIZED


@pytest.mark.usefixtures("reported_at_once")
def test_measured_links_are_shown(cluster: Cluster, pccl_status: Command) -> None:
    cluster.join(3)
    assert "Links of the rings" not in pccl_status(cluster.address).stdout
    cluster.each(lambda peer, _: peer.optimize_topology())
    table = until(  # what the master shows may be half a second old
        lambda: found if "Links of the rings" in (found := pccl_status(cluster.address).stdout) else "",
        "links are shown",
    )
    assert "Mbit/s" in table
    (group,) = json.loads(pccl_status(cluster.address, "--json").stdout)["groups"]
    ring = group["ring"]
    assert [(link["sender"], link["receiver"]) for link in group["links"]] == [
        (ring[at - 1], ring[at]) for at in [*range(1, len(ring)), 0]
    ]
    assert all(link["bytes_per_s"] > 0 for link in group["links"])
    assert "stays" in group["decision"] or "becomes" in group["decision"]


def test_check_exit_code(cluster: Cluster, pccl_status: Command) -> None:
    cluster.join(2)
    host = socket.gethostname()
    for fits in ([], ["--peers", "2"], ["--peers", "2", "--peer", host]):
        done = pccl_status(cluster.address, "--check", *fits)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = pccl_status(cluster.address, "--check", "--peers", "3")
    assert (done.returncode, done.stderr) == (1, "pccl status: 2 peers are in the run, not 3\n")
    done = pccl_status(cluster.address, "--check", "--peer", "elsewhere")
    assert (done.returncode, done.stderr) == (1, "pccl status: no peer elsewhere is in the run\n")
    assert "need --check" in pccl_status(cluster.address, "--peers", "3").stderr


def test_kicked_peer_is_told_and_the_others_continue(cluster: Cluster, pccl_status: Command) -> None:
    cluster.join(3)
    kicked = run_status(cluster.address).members[1]
    op = cluster[0].all_reduce_async(np.ones(10, np.float32))
    in_flight = cluster[1].all_reduce_async(np.ones(10, np.float32)).result
    done = pccl_status(cluster.address, "--kick", kicked.name if kicked.name else str(kicked.peer))
    assert (done.returncode, done.stdout) == (1, ""), "all peers of this process have one name"
    assert "3 peers are named" in done.stderr
    done = pccl_status(cluster.address, "--kick", "")
    assert (done.returncode, done.stderr) == (1, "pccl status: --kick needs the number or the name of a peer\n")
    done = pccl_status(cluster.address, "--kick", str(kicked.peer))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"peer {kicked.peer} ({kicked.name}) has been removed from the run" in done.stdout
    for error in (refusal(in_flight), refusal(partial(cluster[1].all_reduce, np.ones(10, np.float32)))):
        assert type(error) is UsageError, "the calls of peers do match"
        assert "the operator has removed this peer from the run (pccl status --kick)" in str(error)
        assert "connect() again" not in str(error)
    error = refusal(op.result)
    assert error.result is Result.RANK_CONNECTION_LOST
    assert "the operator has removed it (pccl status --kick)" in error.message
    together([partial(cluster[at].all_reduce, np.ones(10, np.float32)) for at in (0, 2)])
    status = until(lambda: found if len((found := run_status(cluster.address)).members) == 2 else None, "it is gone")
    assert [loss.reason for loss in status.losses] == ["the operator has removed it (pccl status --kick)"]
    done = pccl_status(cluster.address, "--kick", str(kicked.peer))
    assert (done.returncode, done.stderr) == (1, f"pccl status: no peer {kicked.peer} is in the run\n")


def test_kick_needs_the_token(pccl_status: Command) -> None:
    with MasterNode("127.0.0.1:0", token="secret") as node:
        done = pccl_status(node.address, "--kick", "1")
        assert done.returncode == 1
        assert "token" in done.stderr
        assert pccl_status(node.address, "--kick", "1", "--check").returncode == 1
        error = refusal(partial(kick, node.address, 1, token="wrong"))
        assert "token" in error.message
        assert "no peer 1 is in the run" in refusal(partial(kick, node.address, 1, token="secret")).message


def test_waits_are_shown(cluster: Cluster) -> None:
    cluster.join(2)
    waiting = Background(cluster[0].update_topology)
    status = until(lambda: next((s for s in [run_status(cluster.address)] if s.members[0].waiting), None), "a wait")
    assert status is not None
    wait = status.members[0].waiting
    assert wait is not None
    assert (wait.call, wait.missing) == ("update_topology", [status.members[1].peer])
    cluster[1].update_topology()
    waiting.result()
    after = run_status(cluster.address)
    assert (after.view, after.totals) == (status.view, status.totals)
    assert len(after.members) == 2


def test_status_needs_token(tmp_path: Path, pccl_status: Command) -> None:
    path = tmp_path / "token"
    path.write_text("secret\n")
    with MasterNode("127.0.0.1:0", token="secret") as master:
        assert pccl_status(master.address, "--token-file", str(path)).returncode == 0
        assert pccl_status(master.address, PCCL_TOKEN="secret").returncode == 0
        wrong = pccl_status(master.address, PCCL_TOKEN="guess")
        assert (wrong.returncode, wrong.stdout) == (1, "")
        assert "a different token" in wrong.stderr
        without = pccl_status(master.address, "--json")
        assert (without.returncode, without.stdout) == (1, "")
        assert "this peer has none" in without.stderr


def test_tls(pccl_status: Command) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATES / "master.pem")
    with MasterNode("localhost:0", ssl_context=context) as master:
        with pytest.raises(PCCLError, match="asks for TLS"):
            run_status(master.address)
        done = pccl_status(master.address, PCCL_TLS_CA=str(CERTIFICATES / "ca.pem"))
        assert done.returncode == 0, done.stderr


def test_killed_peer_is_shown_with_reason(cluster: Cluster) -> None:
    cluster.join(1)
    code = "import sys, time, pccl; c = pccl.Communicator(sys.argv[1]); c.connect(); time.sleep(1000)"
    with subprocess.Popen([sys.executable, "-P", "-c", code, cluster.address]) as process:
        waiting = "the other process waits to be let in"
        until(lambda: any(member.state == "pending" for member in run_status(cluster.address).members), waiting)
        cluster[0].update_topology()
        process.kill()
    status = until(lambda: next((s for s in [run_status(cluster.address)] if s.losses), None), "its loss")
    assert status is not None
    assert (status.totals.joins, status.totals.losses, status.totals.leaves) == (2, 1, 0)
    assert status.losses[0].reason
    assert [member.state for member in status.members] == ["accepted"]


def _answer(address: str, request: m.StatusRequest) -> m.ToWatcher:
    """Return the answer to a request made by hand."""
    host, port = address.rsplit(":", 1)
    with socket.create_connection((host, int(port)), TIMEOUT_S) as sock:
        sock.sendall(encode(request))
        decoder: Decoder[m.ToWatcher] = Decoder(m.ToWatcher)
        while True:
            for message in decoder.feed(sock.recv(4096)):
                return message


def test_other_protocol_version_is_refused(master: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = _answer(master.address, m.StatusRequest(m.PROTOCOL_VERSION + 1))
    assert isinstance(answer, m.Goodbye)
    assert f"the client {m.PROTOCOL_VERSION + 1}" in answer.reason
    monkeypatch.setattr(clients, "m", SimpleNamespace(**{**vars(m), "PROTOCOL_VERSION": m.PROTOCOL_VERSION - 1}))
    with pytest.raises(PCCLError, match=r"speaks protocol .*; install the same version of pccl on both"):
        run_status(master.address)


def test_status_readers_are_bounded(master: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "STATUS_READERS_MAX", 0)
    with pytest.raises(PCCLError, match="try again"):
        run_status(master.address)
    monkeypatch.undo()
    assert run_status(master.address).members == []


def test_leading_master_is_shown(cluster: Cluster, pccl_status: Command) -> None:
    with MasterNode("127.0.0.1:0", standby_of=cluster.address) as standby:
        assert standby.address is not None
        assert run_status(standby.address).role == "standby"
        several = f"{standby.address},{cluster.address}"
        cluster.join(1)
        until(lambda: run_status(several).role == "leading", "what was asked before is no longer shown")
        assert len(run_status(several).members) == 1
        assert "standby" in pccl_status(standby.address).stdout
        assert pccl_status(several, "--check", "--peers", "1").returncode == 0
        # One of them is enough.
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            closed = f"127.0.0.1:{nobody.getsockname()[1]}"
            assert run_status(f"{closed},{cluster.address}").role == "leading"
            with pytest.raises(PCCLError, match=f"cannot reach a master at {closed}"):
                run_status(closed)


def test_status_of_other_server(pccl_status: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(PCCLError, match="is a pccl master running") as caught:
            run_status(address, timeout=0.2)
        assert caught.value.result == Result.TIMEOUT

        def babble() -> None:
            server.accept()[0].close()  # the first one has timed out
            connection = server.accept()[0]
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.recv(1000)
            connection.close()

        thread = threading.Thread(target=babble, daemon=True)
        thread.start()
        with pytest.raises(PCCLError, match=r"no pccl master answered \(got b'HTTP/1.1"):
            run_status(address)
        thread.join(TIMEOUT_S)
    done = pccl_status(address)
    assert done.returncode == 1
    assert "cannot reach a master" in done.stderr
    with pytest.raises(PCCLError) as refused:
        run_status("")
    assert refused.value.result == Result.INVALID_ARGUMENT


def test_watch_flushes_to_pipe(master: MasterNode) -> None:
    """A terminal shows them in one place; what is no terminal gets one after the other, also while nobody answers."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-P", "-m", "pccl", "status", master.address, "--watch", "0.01", "--timeout", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        seen = 0
        while seen < 3:
            line = process.stdout.readline()
            assert line
            seen += line.startswith("run ")
        master.interrupt()
        while (line := process.stdout.readline()) and "cannot reach a master" not in line:
            pass
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=TIMEOUT_S)
    assert "cannot reach a master" in line
    assert process.returncode == 130


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon"])
def test_watch_pauses(pccl_status: Command, text: str) -> None:
    done = pccl_status("127.0.0.1:1", "--watch", text)
    assert done.returncode == 2
    assert f"argument --watch: {text} is not a positive number of seconds" in done.stderr


def test_names_are_not_markup() -> None:
    with MasterNode("127.0.0.1:0") as master:
        empty = run_status(master.address)
    odd = "[bold]x[/nonsense]"
    waiting = Waiting("sync_shared_state", 75.0, [3, 4])
    members = [MemberStatus(1, odd, 0, f"{odd}:5", "accepted", 1.0, waiting, [], 12.0, False)]
    values = {name: getattr(empty, name) for name in empty.__struct_fields__}
    values |= {"members": members, "losses": [Loss(100, 2, odd, 0, odd)], "events": [Event(1.0, "warning", odd)]}
    out = io.StringIO()
    Console(file=out, width=200).print(render(RunStatus(**values)))
    assert out.getvalue().count(odd) == 5
    assert "sync_shared_state for peers 3, 4, 75 s; the master waits for its answer, 12 s; sends no" in out.getvalue()


def test_figures_of_links_and_stragglers_are_shown() -> None:
    link = LinkTraffic(2, 10**9, 25e6, 0.0605, 0.05, 0.0123, 1_500_000, 0.1, 0.02, is_udp=True)
    members = [
        MemberStatus(peer, f"vm:{peer}", 0, "h:1", "accepted", 60.0, traffic=PeerTraffic(links=[link] * (peer == 1)))
        for peer in (1, 2)
    ]
    members.append(MemberStatus(3, "vm:3", 1, "h:1", "accepted", 60.0, figures={"step": 30}))
    finding = Finding("straggler", 2, 0, "peer 2 (vm:2) straggles", 12.0)
    groups = [GroupStatus(group, [], 1, "running", True, 0, 0) for group in (0, 1)]
    status = RunStatus(
        *("r", 1, "1", 1.0, 5.0, 1, False, groups, members, Totals(), Course(1.0, []), [], []), findings=[finding]
    )
    out = io.StringIO()
    Console(file=out, width=80).print(render(status))
    text = " ".join(out.getvalue().split())
    assert "0 running revision 0 1 (mesh) 1 running step 30 1 (mesh)" in text
    assert "12 s 2 (vm:2) straggler peer 2 (vm:2) straggles" in text
    assert "1 (vm:1) 2 (vm:2) 25.0 MB/s UDP 60.50 50.00 1.2% 1.5 MB 10% 2%" in text
    metrics = exposition(status)[1].decode()
    assert 'pccl_culprit{kind="straggler",peer="2"} 1.0' in metrics
    assert 'pccl_link_bytes_per_second{peer="1",to="2"} 2.5e+07' in metrics
    assert 'pccl_link_retransmitted_ratio{peer="1",to="2"} 0.0123' in metrics


def test_long_names_do_not_fold_rows_of_links() -> None:
    links = PeerTraffic(links=[LinkTraffic(2, 10**9, 25e6)])
    members = [
        MemberStatus(peer, f"{'x' * 60}.example.com:{peer}", 0, "h:1", "accepted", 60.0, traffic=links)
        for peer in (1, 2)
    ]
    status = RunStatus("r", 1, "1", 1.0, 5.0, 1, False, [], members, Totals(), Course(1.0, []), [], [])
    out = io.StringIO()
    Console(file=out, width=160).print(render(status))
    table = out.getvalue().partition("Traffic of links")[2].partition("address")[0]
    assert len([line for line in table.splitlines() if "xxx" in line]) == 2


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.9, "9.9 s"), (60, "60 s"), (600, "10 min"), (10_000, "2.8 h")]
)
def test_spans(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_default_name_of_launched_peer() -> None:
    """Its number, host and process, and its index where `pccl launch` has started it."""
    with MasterNode("127.0.0.1:0") as master:
        empty = run_status(master.address)
    waiting = Waiting("update_topology", 12.0, [2])
    members = [
        MemberStatus(1, "vm:8140 [1]", 0, "h:1", "accepted", 1.0, waiting),
        MemberStatus(2, "vm:8141 [0]", 0, "h:2", "accepted", 1.0),
    ]
    values = {name: getattr(empty, name) for name in empty.__struct_fields__}
    out = io.StringIO()
    Console(file=out, width=200).print(render(RunStatus(**values | {"members": members})))
    assert " 2 (vm:8141 [0]) " in out.getvalue()
    assert "update_topology for peer 2 (vm:8141 [0]), 12 s" in out.getvalue()


@pytest.mark.usefixtures("reported_at_once")
def test_figures_of_programs_are_shown(cluster: Cluster, pccl_status: Command) -> None:
    cluster.join(2)
    for peer in cluster.peers:
        peer.report(step=2, loss=0.75)
    peer.report(step=4)

    def figures() -> list[dict[str, float]]:
        return [member.figures for member in run_status(cluster.address).members]

    until(lambda: [each.get("step") for each in figures()] == [2, 4], "all figures are reported")
    assert [each["loss"] for each in figures()] == [0.75, 0.75]
    assert ["step_s" in each for each in figures()] == [False, True]
    shown = until(
        lambda: found if "step 4" in (found := pccl_status(cluster.address).stdout) else "", "the table shows them"
    )
    assert shown.count("loss 0.75") == 2


@pytest.mark.usefixtures("reported_at_once")
def test_training_reports_its_step(cluster: Cluster) -> None:
    cluster.join(1)
    training = DiLoCo(cluster[0], {"w": np.zeros(8, np.float32)})
    training.join()
    for _ in range(3):
        training.outer_step()
    until(lambda: run_status(cluster.address).members[0].figures.get("step") == 3, "its step is reported")


def test_figure_that_is_no_number_is_refused(cluster: Cluster) -> None:
    cluster.join(1)
    for wrong in ({"loss": "much"}, {"x" * 65: 1.0}):
        assert refusal(partial(cluster[0].report, **wrong)).result is Result.INVALID_ARGUMENT
    Communicator(cluster.address).report(loss=1.0)  # in no run
