"""The master of a run with token, TLS and encryption is killed: only one with the same credentials continues it."""

from __future__ import annotations

import ssl

import pytest

from pccl import MasterNode
from tests.processes.conftest import Run, Start
from tests.processes.harness import Worker
from tests.runtime.network.test_tls import CA, CERTIFICATES, master_context
from tests.support.cluster import until

TOKEN = "open sesame"
CERTIFICATE = str(CERTIFICATES / "master.pem")
COUNT = 2**20
MASTER_TIMEOUT_S = 30.0
PEER_TIMEOUT_S = 2.0


@pytest.fixture(autouse=True)
def guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials for all processes of the test."""
    monkeypatch.setenv("PCCL_TOKEN", TOKEN)
    monkeypatch.setenv("PCCL_ENCRYPT", "1")
    monkeypatch.setenv("PCCL_TLS_CA", CA)


def _listen(start: Start, address: str = "127.0.0.1:0", standby_of: str = "") -> tuple[Worker, str]:
    (master,) = start(1)
    found: str = master.do(
        "listen", address=address, standby_of=standby_of, peer_timeout=PEER_TIMEOUT_S, certificate=CERTIFICATE
    )
    return master, found


def _meet(peers: list[Worker], newcomer: Worker) -> None:
    """Admit the newcomer; its error is reported first, since without it the others wait for ever."""
    for peer in peers:
        peer.begin("gather", world=len(peers) + 1)
    for worker in (newcomer, *peers):
        answer = worker.answer()
        assert not answer.error, answer.text


def _go_on(peers: list[Worker], newcomer: Worker, addresses: str) -> None:
    """Admit one more peer, then reduce and sync."""
    newcomer.begin("connect", master=addresses, master_timeout=MASTER_TIMEOUT_S)
    _meet(peers, newcomer)
    everybody = [*peers, newcomer]
    for seed, worker in enumerate(everybody):
        worker.do("array", name="x", count=COUNT, seed=seed)
        worker.do("state", name="s", arrays=["x"])
    for command, arguments in (("sync", {"name": "s"}), ("all_reduce", {"name": "x"})):
        for worker in everybody:
            worker.begin(command, **arguments)
        for worker in everybody:
            assert not worker.answer().error
        assert len({worker.do("digest", name="x") for worker in everybody}) == 1


def test_master_with_tls_killed_and_restarted(start: Start, run: Run) -> None:
    master, address = _listen(start)
    peers = run(2, address, master_timeout=MASTER_TIMEOUT_S)
    master.kill()
    _listen(start, address)
    _go_on(peers, *start(1), address)


@pytest.mark.parametrize(
    ("token", "context"),
    [
        pytest.param("guess", master_context(), id="another token"),
        pytest.param(TOKEN, None, id="no TLS"),
        pytest.param(TOKEN, master_context("expired"), id="no valid certificate"),
    ],
)
def test_master_with_wrong_credentials_is_refused(
    start: Start, run: Run, caplog: pytest.LogCaptureFixture, token: str, context: ssl.SSLContext | None
) -> None:
    master, address = _listen(start)
    peers = run(2, address, master_timeout=MASTER_TIMEOUT_S)
    master.kill()
    with MasterNode(address, token=token, ssl_context=context, peer_timeout=PEER_TIMEOUT_S):
        # Each has tried, and again after that.
        until(lambda: sum("refused" in text for text in caplog.messages) >= 2 * len(peers), "it is asked")
    assert [peer.do("has_master") for peer in peers] == [False] * 2
    _listen(start, address)
    _go_on(peers, *start(1), address)
