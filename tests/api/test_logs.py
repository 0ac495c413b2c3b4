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
from tests.support.cluster import Cluster, evict, reduce_once, until

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


def test_json_format() -> None:
    lines = [json.loads(line) for line in run_with(PCCL_LOG_LEVEL="INFO", PCCL_LOG_FORMAT="json")]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    (installed,) = (line for line in lines if line["message"].startswith("view 1: peer 1"))
    assert (installed["logger"], installed["level"]) == ("pccl.peer", "INFO")
    assert (installed["view"], installed["group"], installed["peer"]) == (1, 0, 1)
    (wants,) = (line for line in lines if "wants to join" in line["message"])
    assert (wants["logger"], wants["group"], wants["peer"]) == ("pccl.master", 0, 1)
    assert wants["run"] == installed["run"]


def test_unknown_format_or_level() -> None:
    lines = run_with(PCCL_LOG_LEVEL="LOUD", PCCL_LOG_FORMAT="xml")
    assert any("PCCL_LOG_LEVEL='LOUD' is not one of" in line for line in lines)
    assert any("PCCL_LOG_FORMAT='xml' is not one of" in line for line in lines)


def test_misspelled_variables_are_named() -> None:
    lines = run_with(
        PCCL_MASTR="a:1", PCCL_TOKEN="secret", PCCL_LOGLEVEL="INFO", PCCL_MY_OWN="1", PCCL_LOG_LEVEL="WARN"
    )
    assert [line.partition("variable ")[2] for line in lines if "variable" in line] == [
        "PCCL_LOGLEVEL is not one of pccl's: is it PCCL_LOG_LEVEL?",
        "PCCL_MASTR is not one of pccl's: is it PCCL_MASTER?",
    ]
    assert "secret" not in " ".join(lines)


def test_fields_of_an_aborted_op_and_a_loss(caplog: pytest.LogCaptureFixture) -> None:
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


def test_losses_and_joins_are_warnings_of_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with MasterNode("127.0.0.1:0") as node:
        cluster = Cluster(node.address)
        cluster.join(2)
        assert not caplog.records  # the run is still gathering its peers
        cluster.each(reduce_once)
        cluster.join()
        until(lambda: len(caplog.records) == 2, "both report the newcomer")
        cluster.close(cluster[2])
        cluster.join()
        until(lambda: len(caplog.records) == 4, "a peer that leaves is no loss")
        evict(node, cluster.peers.pop())
        cluster.each(reduce_once)
        until(lambda: len(caplog.records) == 6, "both report the loss")
        evict(node, cluster.peers.pop())
        until(lambda: len(caplog.records) == 7, "the last peer reports the loss")
        assert caplog.records.pop().getMessage().endswith("; 1 of its group remains")
        cluster.close_all()
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    shown = [re.sub(r"\(.*\)", "(it)", record.getMessage()) for record in caplog.records]
    assert shown[0::2] == shown[1::2]
    assert shown[0::2] == [
        "peer 3 (it) joined; the group has 3 peers",
        "peer 4 (it) joined; the group has 3 peers",
        "peer 4 (it) was lost: evicted: silent for 5.0 s; 2 of its group remain",
    ]


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


def test_warnings_are_shown_by_default() -> None:
    code = "import logging, pccl; log = logging.getLogger('pccl.x'); log.warning('seen'); log.info('not seen')"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PCCL_")}
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, env=clean)
    assert done.stderr == "seen\n"
