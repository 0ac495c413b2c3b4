"""Long waits are logged with the peers they wait for, repeatedly and at their end; timeouts name these peers, too."""

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

from pccl import Communicator, MasterNode, PCCLError, Result, SharedState
from pccl.training import DiLoCo
from tests.support.cluster import SUM, Background, Cluster, ones, refusal, run_of, until, waits_at_master

NAME = f"{re.escape(socket.gethostname())}:{os.getpid()}"
"""What peers of this process call themselves, as a pattern."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits count as long after a moment."""
    monkeypatch.setattr("pccl.protocol.wait_reasons.FIRST_S", 0.1)
    monkeypatch.setattr("pccl.runtime.session.reports.REPORT_S", 0.02)
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
def test_long_group_call_names_missing_peers(
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
    until(lambda: warned(pattern), "the wait is logged")
    until(lambda: sum(bool(re.match(pattern, text)) for text in caplog.messages) > 1, "it is logged again")
    call(cluster[1])
    early.result()
    until(lambda: warned(rf"^{name} has ended after "), "the end is logged")


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
def test_long_op_names_missing_peers(
    cluster: Cluster,
    warned: Warned,
    early: Callable[[Communicator], Any],
    late: Callable[[Communicator], Any],
    says: str,
) -> None:
    cluster.join(2)
    waiting = Background(partial(early, cluster[0]))
    until(lambda: warned(says), "the wait is logged")
    late(cluster[1])
    waiting.result()
    until(lambda: warned(r"with tag \d.* has ended after "), "the end is logged")


def test_long_connect_names_the_peers_to_call(cluster: Cluster, warned: Warned) -> None:
    cluster.join(1)
    joining = Background((newcomer := cluster.new()).connect)
    pattern = (
        rf"^connect has waited \d+ s for the peers of the run, .* calling update_topology: peer 1 \({NAME}\); look at"
    )
    until(lambda: warned(pattern), "the wait is logged")
    until(lambda: waits_at_master(newcomer), "it waits")
    cluster[0].update_topology()
    joining.result()
    until(lambda: warned("^connect has ended after "), "the end is logged")
    newcomer.close()


def test_long_call_without_master_is_logged(monkeypatch: pytest.MonkeyPatch, warned: Warned) -> None:
    monkeypatch.setenv("PCCL_MASTER_TIMEOUT", "0.6")
    with MasterNode("127.0.0.1:0") as node:
        cluster = Cluster(node.address)
        cluster.join(2)
    waiting = Background(cluster[0].update_topology)
    pattern = "^update_topology has waited . s for a master, because the last one is lost.*; `pccl doctor "
    until(lambda: warned(pattern), "it is logged")
    assert isinstance(waiting.outcome(), PCCLError)
    cluster.close_all()


def test_long_join_is_logged(cluster: Cluster, warned: Warned) -> None:
    cluster.join(1)
    joining = Background(lambda: DiLoCo(cluster[0], {"w": ones()}).join(peers_min=2))
    until(
        lambda: warned(r"^join has waited \d+ s for more peers: 1 of 2 are present; look at `pccl status"),
        "it is logged",
    )
    cluster[0].close()
    assert isinstance(joining.outcome(), PCCLError)
    assert warned("^join has ended after")


def test_wait_within_a_training_call_names_that_call(
    cluster: Cluster, warned: Warned, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.join(2)
    may_go_on = threading.Event()
    monkeypatch.setattr(cluster[1], "are_peers_pending", lambda: may_go_on.wait() and cluster[1].close())
    joining = [Background(partial(DiLoCo(peer, {"w": ones()}).join, peers_min=3)) for peer in (cluster[0], cluster[1])]
    pattern = rf"^join has waited \d+ s for peer 2 \({NAME}\), which has not called join; "
    until(lambda: warned(pattern), "it is logged")
    cluster[0].close()
    may_go_on.set()
    assert all(isinstance(each.outcome(), PCCLError) for each in joining)
    assert not warned("are_peers_pending")


# Timeouts.


def test_timeout_of_a_group_call_names_missing_peers() -> None:
    with run_of(3) as cluster:
        error = refusal(partial(cluster[0].update_topology, timeout=0.2))
        assert error.result is Result.TIMEOUT
        assert re.search(
            rf"not finished within 0.2 s; it waited for peers 2 \({NAME}\), 3 \({NAME}\), which have not called",
            str(error),
        )
        cluster.each(lambda peer, _: peer.update_topology())


@pytest.mark.parametrize("elements", [8, 1 << 20])
def test_timeout_names_tag_and_missing_peers(elements: int) -> None:
    """The error of each peer names the one that gave up, and the missing peer."""
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


def test_timeout_of_a_handle_names_tag_and_peers() -> None:
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
from pccl.protocol import wait_reasons
from pccl.runtime.threads import portal
from pccl.status import run_status
from pccl.training import DiLoCo
wait_reasons.FIRST_S = 0.1
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
    ids=["defaults", "errors only", "warnings", "the program's own"],
)
def test_long_waits_are_logged_by_default(setup: str, level: str, is_shown: bool) -> None:
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
