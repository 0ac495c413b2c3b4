"""The log's lines, in words and in fields, for people and for machines."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from pccl import MasterNode, PCCLError, ReduceOp
from pccl.logs import FIELDS, AboutLogger, JsonFormatter, TextFormatter
from pccl.runtime.session import links
from tests.support.cluster import WAIT_S, Cluster, until

RUN = """
import numpy as np, pccl
with pccl.MasterNode("127.0.0.1:0") as node, pccl.Communicator(node.address):
    pass
"""


def run_with(**environment: str) -> list[str]:
    """The lines that a short run logs."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PCCL_")}
    done = subprocess.run(
        [sys.executable, "-P", "-c", RUN], capture_output=True, text=True, timeout=60, env={**clean, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.splitlines()


def test_silent_unless_asked() -> None:
    assert run_with() == []


def test_for_machines_each_line_is_an_object() -> None:
    lines = [json.loads(line) for line in run_with(PCCL_LOG_LEVEL="INFO", PCCL_LOG_FORMAT="json")]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    (installed,) = (line for line in lines if line["message"].startswith("view 1: peer 1"))
    assert (installed["logger"], installed["level"]) == ("pccl.peer", "INFO")
    assert (installed["view"], installed["group"], installed["peer"]) == (1, 0, 1)
    (wants,) = (line for line in lines if "wants to join" in line["message"])
    assert (wants["logger"], wants["group"], wants["peer"]) == ("pccl.master", 0, 1)
    assert wants["run"] == installed["run"]


def test_for_people_it_stands_before_the_words() -> None:
    lines = run_with(PCCL_LOG_LEVEL="INFO")
    assert any(" INFO pccl.peer [view 1, group 0, peer 1]: view 1: peer 1 of group 0" in line for line in lines)


def test_an_unknown_format_or_level_is_named() -> None:
    lines = run_with(PCCL_LOG_LEVEL="LOUD", PCCL_LOG_FORMAT="xml")
    assert any("PCCL_LOG_LEVEL='LOUD' is not one of" in line for line in lines)
    assert any("PCCL_LOG_FORMAT='xml' is not one of" in line for line in lines)


def test_an_aborted_op_and_a_loss_are_found_by_their_fields(caplog: pytest.LogCaptureFixture) -> None:
    with MasterNode("127.0.0.1:0") as node, caplog.at_level(logging.INFO, "pccl"):
        cluster = Cluster(node.address)
        cluster.join(2)
        with pytest.raises(PCCLError, match="TIMEOUT"):
            cluster[0].all_reduce(np.ones(3, np.float32), op=ReduceOp.SUM, tag=77, timeout=0.05)
        (aborted,) = (record for record in caplog.records if "aborted" in record.getMessage())
        assert vars(aborted).items() >= {"group": 0, "tag": 77, "sequence": 0}.items()
        cluster.close(cluster[1])
        until(lambda: any(getattr(record, "other", None) == 2 for record in caplog.records), "peer 1 names peer 2")
        cluster.close_all()
    (left,) = (record for record in caplog.records if re.match(r"peer 2 \(\S*\) lost: left", record.getMessage()))
    assert vars(left).items() >= {"group": 0, "peer": 2}.items()


def test_an_orderly_leave_is_no_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "STANDS_S", 1000.0)
    with MasterNode("127.0.0.1:0") as node, caplog.at_level(logging.WARNING, "pccl"):
        cluster = Cluster(node.address, p2p_connection_pool_size=8)
        cluster.join(3)
        cluster.close(cluster[1])
        sessions = [peer._inner._session for peer in cluster.peers]
        assert [session._outbound.links_made for session in sessions if session] == [1, 1], (
            "nobody will say anything of it"
        )
        # One by one: of two that leave at once, one may miss the other before the master has heard of either.
        while cluster.peers:
            cluster.close(cluster[-1])
    assert caplog.messages == []


def test_text_and_objects_of_one_record() -> None:
    lines: list[logging.LogRecord] = []
    logger = logging.Logger("pccl.test")
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    about = AboutLogger(logger, lambda: {"run": "r", "view": 4, "peer": 1})
    about.warning("no link to %s", "x\ny", extra={"other": 2, "peer": 3})
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("broken")
    text = TextFormatter().format(lines[0])
    assert text.endswith(" WARNING pccl.test [view 4, peer 3, other 2]: no link to x\ny")
    told = json.loads(JsonFormatter().format(lines[0]))
    assert {name: told[name] for name in FIELDS if name in told} == {"run": "r", "view": 4, "peer": 3, "other": 2}
    assert "ValueError: why" in json.loads(JsonFormatter().format(lines[1]))["exception"]
    assert "\n" not in JsonFormatter().format(lines[1])
    assert " ERROR pccl.test: broken" in TextFormatter().format(lines[1])


def test_warnings_are_seen_without_any_configuration() -> None:
    code = "import logging, pccl; log = logging.getLogger('pccl.x'); log.warning('seen'); log.info('not seen')"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PCCL_")}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, env=clean)
    assert done.stderr == "seen\n"


def test_no_call_waits_for_a_stderr_that_is_not_read_in_the_background(full_pipe: tuple[int, int]) -> None:
    """As of `pccl master`."""
    code = """
import logging
from pccl.logs import configure
configure("WARN", in_background=True)
for number in range(20_000):
    logging.getLogger("pccl").warning("%s", f"record {number}")
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], stderr=full_pipe[1], timeout=WAIT_S, check=False)
    assert done.returncode == 0


def test_what_was_logged_last_is_written_at_the_end() -> None:
    code = "import logging, pccl\nfor i in range(3000): logging.getLogger('pccl').info('line %d', i)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={**os.environ, "PCCL_LOG_LEVEL": "INFO"},
    )
    assert len(done.stderr.splitlines()) == 3000
    assert done.stderr.endswith(": line 2999\n")
