"""No call waits in silence: each says for whom it waits, again and again, and when that is over; so do timeouts."""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import trio

from pccl import AsyncCommunicator, Communicator, MasterNode, PCCLError, Result, SharedState
from pccl.runtime.threads import portal, waking
from pccl.status import run_status
from pccl.training import DiLoCo
from tests.support.cluster import SUM, Background, Cluster, ones, refusal, run_of, until, waits_at_master

NAME = f"{re.escape(socket.gethostname())}:{os.getpid()}"
"""What peers of this process call themselves, as a pattern."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits count as long after a moment."""
    monkeypatch.setattr("pccl.protocol.long_wait.FIRST_S", 0.1)
    monkeypatch.setattr("pccl.runtime.session.reports.REPORT_S", 0.02)
    monkeypatch.setattr(waking, "LOOK_S", 0.02)
    monkeypatch.setattr("pccl.runtime.master.requests.REFRESH_S", 0.0)


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[str], bool]]:
    """A function that tells whether a warning matches."""
    with caplog.at_level(logging.WARNING, "pccl"):
        yield lambda pattern: any(re.search(pattern, each.getMessage()) for each in list(caplog.records))


Warned = Callable[[str], bool]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda peer: peer.update_topology(), "update_topology"),
        (lambda peer: peer.are_peers_pending(), "are_peers_pending"),
        (lambda peer: peer.optimize_topology(), "optimize_topology"),
        (lambda peer: peer.sync_shared_state(SharedState.from_numpy({"x": ones()})), "sync_shared_state"),
    ],
)
def test_group_calls_name_who_has_not_called(
    cluster: Cluster,
    warned: Warned,
    caplog: pytest.LogCaptureFixture,
    call: Callable[[Communicator], Any],
    name: str,
) -> None:
    cluster.join(2)
    early = Background(partial(call, cluster[0]))
    where = re.escape(f"look at `pccl status {cluster.address}`")
    pattern = rf"^{name} has waited \d+ s for peer 2 \({NAME}\), which has not called {name}; {where}"
    until(lambda: warned(pattern), "it is said for whom it waits")
    until(lambda: sum(bool(re.match(pattern, text)) for text in caplog.messages) > 1, "it is said again")
    call(cluster[1])
    early.result()
    until(lambda: warned(rf"^{name} has ended after "), "it is said that it is over")


@pytest.mark.parametrize(
    ("early", "late", "says"),
    [
        (
            lambda peer: peer.all_reduce(ones(), op=SUM, tag=7),
            lambda peer: peer.all_reduce(ones(), op=SUM, tag=7),
            rf"the op with tag 7 has waited \d+ s for peer 2 \({NAME}\), which has not called it; look at",
        ),
        (
            lambda peer: peer.barrier(),
            lambda peer: peer.barrier(),
            rf"the op with tag 0 has waited \d+ s for peer 2 \({NAME}\), which has not called it; look at",
        ),
        (
            lambda peer: peer.recv(ones(), src=1, tag=3),
            lambda peer: peer.send(ones(), dst=0, tag=3),
            rf"recv with tag 3 from peer 2 \({NAME}\) has waited \d+ s for peer 2 \(.*\), which has not called send",
        ),
        (
            lambda peer: peer.send(np.ones(1 << 20, np.float32), dst=1, tag=3),
            lambda peer: peer.recv(np.ones(1 << 20, np.float32), src=0, tag=3),
            rf"send with tag 3 to peer 2 \({NAME}\) has waited \d+ s for peer 2 \({NAME}\), which has not called recv",
        ),
    ],
    ids=["all_reduce", "barrier", "recv", "send"],
)
def test_ops_name_who_has_not_called(
    cluster: Cluster,
    warned: Warned,
    early: Callable[[Communicator], Any],
    late: Callable[[Communicator], Any],
    says: str,
) -> None:
    cluster.join(2)
    waiting = Background(partial(early, cluster[0]))
    until(lambda: warned(says), "it is said for whom it waits")
    late(cluster[1])
    waiting.result()
    until(lambda: warned(r"with tag \d.* has ended after "), "it is said that it is over")


def test_a_newcomer_names_who_has_to_let_it_in(cluster: Cluster, warned: Warned) -> None:
    cluster.join(1)
    joining = Background((newcomer := cluster.new()).connect)
    pattern = (
        rf"^connect has waited \d+ s for the peers of the run, .* calling update_topology: peer 1 \({NAME}\); look at"
    )
    until(lambda: warned(pattern), "it is said who has to let it in")
    until(lambda: waits_at_master(newcomer), "it waits")
    cluster[0].update_topology()
    joining.result()
    until(lambda: warned("^connect has ended after "), "it is said that it is over")
    newcomer.close()


def test_whoever_finds_no_master_says_what_is_tried(
    warned: Warned, nobody: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl._session_holder.FIRST_S", 0.1)
    connecting = Background(partial(Communicator(nobody).connect, 2))
    pattern = (
        rf"^connect has waited \d+ s for the master at {nobody}, attempt 1 of 2: .*refused.*; `pccl doctor {nobody}`"
    )
    until(lambda: warned(pattern), "it is said what is tried")
    assert isinstance(connecting.outcome(), PCCLError)
    until(lambda: warned("^connect has ended its search for a master after "), "it is said that it is over")


def test_a_call_without_a_master_says_so(monkeypatch: pytest.MonkeyPatch, warned: Warned) -> None:
    monkeypatch.setenv("PCCL_MASTER_TIMEOUT", "0.6")
    with MasterNode("127.0.0.1:0") as node:
        cluster = Cluster(node.address)
        cluster.join(2)
    waiting = Background(cluster[0].update_topology)
    until(lambda: warned("^update_topology has waited . s for a master, for the last one is lost"), "it is said")
    assert isinstance(waiting.outcome(), PCCLError)
    cluster.close_all()


def test_a_call_that_does_not_wait_for_long_says_nothing(
    cluster: Cluster, warned: Warned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pccl.protocol.long_wait.FIRST_S", 60.0)  # what a busy machine does not pass by itself
    cluster.join(2)
    for _ in range(20):
        cluster.each(lambda peer, _: peer.are_peers_pending())
        cluster.each(lambda peer, _: peer.all_reduce(ones(), op=SUM))
    assert not warned("has waited|has ended")


def test_async_calls_say_it_too(warned: Warned) -> None:
    async def body() -> None:
        with MasterNode("127.0.0.1:0") as node, Communicator(node.address):
            peer = AsyncCommunicator(node.address)
            with pytest.raises(PCCLError, match="TIMEOUT"):
                await peer.connect(timeout=0.5)

    trio.run(body)
    assert warned(r"^connect has waited \d+ s for the peers of the run, which have yet to let this one in")


def test_requests_of_the_status_say_whom_they_wait_for(warned: Warned) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PCCLError, match="TIMEOUT"):
            run_status(address, timeout=0.4)
    assert warned(
        rf"^the request for the status has waited \d+ s for an answer from {address}; `pccl doctor {address}`"
    )
    assert warned("^the request for the status has ended after")


def test_a_training_object_that_waits_for_others_says_so(cluster: Cluster, warned: Warned) -> None:
    cluster.join(1)
    joining = Background(lambda: DiLoCo(cluster[0], {"w": ones()}).join(peers_min=2))
    until(
        lambda: warned(r"^join has waited \d+ s for more peers: 1 of 2 are there; look at `pccl status"), "it is said"
    )
    cluster[0].close()
    assert isinstance(joining.outcome(), PCCLError)
    assert warned("^join has ended after")


def test_a_call_whose_thread_is_held_up_says_so(
    master: MasterNode, warned: Warned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a call waits for its task tells, unless the thread of all tasks stands still."""
    monkeypatch.setattr(portal, "PULSE_S", 0.1)
    release = threading.Event()
    with Communicator(master.address) as peer:
        portal.current().post(release.wait)
        asking = Background(peer.are_peers_pending)
        pattern = r"^a call has waited \d s for pccl's own thread, which runs nothing: .*py-spy dump --pid"
        until(lambda: warned(pattern), "it is said")
        release.set()
        asking.result()
        until(lambda: warned("^a call has ended after"), "its end is said")


# Timeouts.


def test_a_timeout_of_a_group_call_names_who_has_not_called() -> None:
    with run_of(3) as cluster:
        error = refusal(partial(cluster[0].update_topology, timeout=0.2))
        assert error.result is Result.TIMEOUT
        assert re.search(
            rf"not finished within 0.2 s; it waited for peers 2 \({NAME}\), 3 \({NAME}\), which have not called",
            str(error),
        )
        cluster.each(lambda peer, _: peer.update_topology())


@pytest.mark.parametrize("elements", [8, 1 << 20])
def test_a_timeout_names_tag_and_peers_on_both_sides(elements: int) -> None:
    """Those who have called hear who gave up and whom it waited for, and so does who calls late."""
    with run_of(3) as cluster:
        x = [np.ones(elements, np.float32) for _ in range(3)]
        early = Background(partial(cluster[0].all_reduce, x[0], op=SUM, tag=9))
        error = refusal(partial(cluster[1].all_reduce, x[1], op=SUM, tag=9, timeout=0.3))
        late = refusal(partial(cluster[2].all_reduce, x[2], op=SUM, tag=9))
        pattern = (
            rf"peer 2 \({NAME}\) gave up after 0.3 s: the op with tag 9 waited for peer 3 \({NAME}\), "
            "which has not called it"
        )
        for found in (error, early.outcome(), late):
            assert found.result is Result.TIMEOUT
            assert re.search(pattern, str(found)), str(found)


@pytest.mark.parametrize("elements", [8, 1 << 20])
def test_a_timeout_names_whom_this_op_waits_for_and_no_other(elements: int) -> None:
    """Another one is in flight meanwhile, which waits for somebody else."""
    with run_of(3) as cluster:
        x = [np.ones(elements, np.float32) for _ in range(6)]
        first = [cluster[peer].all_reduce_async(x[peer], op=SUM, tag=1) for peer in (0, 2)]
        second = [cluster[peer].all_reduce_async(x[3 + peer], op=SUM, tag=2) for peer in (0, 1)]
        text = str(refusal(partial(first[0].result, 0.3)))
        assert re.search(rf"with tag 1 .* waits for peer 2 \({NAME}\), which has not called it", text), text
        text = str(refusal(partial(second[0].result, 0.3)))
        assert re.search(rf"with tag 2 .* waits for peer 3 \({NAME}\), which has not called it", text), text
        cluster[1].all_reduce(x[1], op=SUM, tag=1)
        cluster[2].all_reduce(x[5], op=SUM, tag=2)
        assert all(handle.wait()[0] for handle in [*first, *second])


def test_a_timeout_of_two_names_tag_and_peers_on_both_sides() -> None:
    with run_of(2) as cluster:
        error = refusal(partial(cluster[0].recv, ones(), src=1, tag=4, timeout=0.2))
        late = refusal(partial(cluster[1].send, ones(), dst=0, tag=4))
        for found in (error, late):
            assert found.result is Result.TIMEOUT
            pattern = (
                rf"peer 1 \({NAME}\) gave up after 0.2 s: the op with tag 4 waited for peer 2 \({NAME}\), which has"
            )
            assert re.search(pattern, str(found)), str(found)


def test_a_wait_for_a_handle_names_tag_and_peers() -> None:
    with run_of(2) as cluster:
        handle = cluster[0].all_reduce_async(ones(), op=SUM, tag=5)
        error = refusal(partial(handle.result, 0.2))
        assert re.search(rf"the op with tag 5 .* waits for peer 2 \({NAME}\)", str(error))
        cluster[1].all_reduce(ones(), op=SUM, tag=5)
        assert handle.wait()[0]


# What is seen without any logging being set up.

SILENT = """
import sys, threading
import pccl
from pccl.protocol import long_wait
from pccl.runtime.threads import portal, waking
from pccl.status import run_status
from pccl.training import DiLoCo
long_wait.FIRST_S, waking.LOOK_S = 0.1, 0.02
{setup}
with pccl.MasterNode("127.0.0.1:0") as node, pccl.Communicator(node.address):
    try:
        pccl.Communicator(node.address).connect(timeout=0.5)
    except pccl.PCCLError as error:
        print(error.result.name)
"""


@pytest.mark.parametrize(
    ("setup", "level", "is_shown"),
    [
        ("", "", True),
        pytest.param("", "ERROR", False, marks=pytest.mark.slow),
        pytest.param("", "WARN", True, marks=pytest.mark.slow),
        ("import logging; logging.basicConfig(level='CRITICAL')", "", False),
    ],
    ids=["nothing set up", "errors only", "warnings", "the program's own"],
)
def test_long_waits_are_seen_where_nobody_has_set_up_logging(setup: str, level: str, is_shown: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PCCL_")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", SILENT.format(setup=setup)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**environment, "PCCL_LOG_LEVEL": level},
    )
    assert (done.returncode, done.stdout) == (0, "TIMEOUT\n"), done.stderr
    assert ("connect has waited" in done.stderr) is is_shown, done.stderr
