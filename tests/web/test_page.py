"""The page in a real browser, headless; skipped where there is none (Debian: apt-get install chromium)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest

from pccl import MasterNode, ReduceOp
from pccl.status import run_status
from tests.support.cluster import Background, Cluster, until, waits_at_master

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--virtual-time-budget=2500"),
)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium here: apt-get install chromium")


def browse(node: MasterNode, profile: Path, *options: str) -> str:
    command = [str(BROWSER), *OPTIONS, f"--user-data-dir={profile}", *options, f"http://{node.http_address}/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def part(dom: str, name: str) -> str:
    """The element with this id, up to the next one with an id."""
    found = re.search(rf'id="{name}".*?(?= id="|<script>)', dom, re.S)
    assert found is not None
    return found.group()


def test_commands_name_the_token_but_do_not_show_it(tmp_path: Path) -> None:
    with MasterNode("127.0.0.1:0", token="0123456789abcdef", http="127.0.0.1:0") as node:
        dom = browse(node, tmp_path / "profile", "--dump-dom")
        assert f">PCCL_TOKEN=... PCCL_MASTER={node.address}" in part(dom, "line")
        assert ">PCCL_TOKEN=... pccl status" in part(dom, "kick")
        assert "0123456789abcdef" not in dom


def test_a_run_as_a_browser_shows_it(tmp_path: Path) -> None:
    with MasterNode("127.0.0.1:0", http="127.0.0.1:0") as node:
        cluster = Cluster(node.address)
        cluster.join(3)
        cluster.each(lambda peer, i: peer.all_reduce(np.ones(1_000_000, np.float32), op=ReduceOp.SUM))
        until(lambda: run_status(node.address).totals.tx_bytes >= 16_000_000, "all bytes are reported")
        cluster.each(lambda peer, _: peer.optimize_topology())
        for peer in cluster.peers:
            peer.report(step=28, loss=0.5)
        until(lambda: all(each.figures for each in run_status(node.address).members), "the figures are reported")
        cluster.close(cluster[1])
        assert node._service is not None
        server = node._service._server
        server._machine.master.state.next_peer = 953_010_001
        newcomer = cluster.new()
        joining = Background(newcomer.connect)
        until(lambda: waits_at_master(newcomer), "the newcomer is known")
        waiting = Background(cluster[0].update_topology)

        # A name that an attacker chose must stay text.
        member = next(iter(server._machine.master.state.members.values()))
        member.hello = msgspec.structs.replace(member.hello, name="<img src=x onerror=document.title='owned'>")

        dom = browse(node, tmp_path / "profile", "--window-size=1200,1200", "--dump-dom")
        assert ">live<" in part(dom, "pulse")
        assert "pccl: 2 peers" in dom
        ring = part(dom, "rings")
        assert ring.count("<circle") == 3
        assert ring.count('class="hollow"') == 1
        assert len(re.findall(r"measured [\d.,]+ .?bit/s [\d.]+ s ago, [\d.]+ ms round trip", ring)) == 2
        assert ring.count('class="waits wait"') == 1
        assert "2 peers, mesh" in ring
        assert "953010001" in part(dom, "peers")
        assert ">…001<" in ring
        assert "update_topology for peer 3" in part(dom, "peers")
        assert ">pending<" in part(dom, "peers")
        assert re.search(r"sends [^<]*\(5.3 MB\)", part(dom, "peers"))
        assert ">16.0 MB</b>sent" in part(dom, "tiles")
        assert ">step 28<" in ring
        assert ">0.5</b>loss, mean" in part(dom, "tiles")
        assert re.search(r"step 28, [^<]*loss 0.5", part(dom, "peers"))
        assert f"PCCL_MASTER={node.address} python script.py" in part(dom, "line")
        assert f"pccl status {node.address} --kick PEER" in part(dom, "kick")
        chart = part(dom, "chart")
        assert chart.count("<svg") == 4
        assert "loss, mean of the peers" in chart
        assert "0.5 now, from 0.5 to 0.5" in chart
        assert "3 joined" in chart
        assert "1 left" in chart
        assert "peer 2" in part(dom, "log")
        assert "&lt;img" in dom
        assert "<img" not in dom

        cluster[1].update_topology()
        waiting.result()
        joining.result()
        newcomer.close()
        cluster.close_all()
