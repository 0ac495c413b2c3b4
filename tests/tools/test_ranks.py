"""Ranks of copies, and their environment."""

from __future__ import annotations

import pytest

from pccl.tools import launch as ranks
from pccl.tools.launch import Nodes, masters_address, nodes
from pccl.tools.report import PlanError


def test_ranks_of_several_nodes() -> None:
    found = [
        ranks.variables(Nodes(2, node), 3, index, "a:48148", ("a", "29500")) for node in range(2) for index in range(3)
    ]
    assert [(each["RANK"], each["LOCAL_RANK"]) for each in found] == [
        *(("0", "0"), ("1", "1"), ("2", "2")),
        *(("3", "0"), ("4", "1"), ("5", "2")),
    ]
    for each in found:
        assert (each["WORLD_SIZE"], each["LOCAL_WORLD_SIZE"]) == ("6", "3")
        assert (each["PCCL_MASTER"], each["MASTER_ADDR"], each["MASTER_PORT"]) == ("a:48148", "a", "29500")
        assert (each["PCCL_LAUNCH_INDEX"], each["PCCL_LAUNCH_COUNT"]) == (each["RANK"], "6")


@pytest.mark.parametrize(
    ("count", "rank", "environment", "expected"),
    [
        (None, None, {}, Nodes(1, 0)),
        (2, 1, {}, Nodes(2, 1)),
        (None, None, {"NNODES": "3", "NODE_RANK": "2"}, Nodes(3, 2)),
        (2, None, {"NODE_RANK": "1", "WORLD_SIZE": "2", "RANK": "0"}, Nodes(2, 1)),
        (2, None, {"WORLD_SIZE": "2", "RANK": "1"}, Nodes(2, 1)),  # of a scheduler that starts one launcher a node
        (2, 0, {"NODE_RANK": "1"}, Nodes(2, 0)),
        (None, None, {"WORLD_SIZE": "8", "RANK": "5"}, Nodes(1, 0)),  # of a launcher around this one
    ],
)
def test_node(count: int | None, rank: int | None, environment: dict[str, str], expected: Nodes) -> None:
    assert nodes(count, rank, environment) == expected


@pytest.mark.parametrize(
    ("count", "rank", "environment", "text"),
    [
        (2, None, {}, "give --node-rank, or set NODE_RANK"),
        (2, None, {"WORLD_SIZE": "8", "RANK": "1"}, "give --node-rank"),
        (2, 2, {}, "node rank 2: must be from 0 to 1 with 2 nodes"),
        (None, None, {"NNODES": "two"}, "NNODES 'two' is not a number"),
        (2, None, {"NODE_RANK": "one"}, "NODE_RANK 'one' is not a number"),
        (None, 1, {}, "must be from 0 to 0 with 1 nodes"),
    ],
)
def test_unknown_node(count: int | None, rank: int | None, environment: dict[str, str], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        nodes(count, rank, environment)


def test_masters_address() -> None:
    assert masters_address(Nodes(), None, {"MASTER_ADDR": "a"}) is None, "started here"
    assert masters_address(Nodes(2, 0), None, {"MASTER_ADDR": "a"}) is None
    assert masters_address(Nodes(2, 1), None, {"MASTER_ADDR": "a"}) == "a:48148"
    assert masters_address(Nodes(2, 1), None, {"MASTER_ADDR": "fe80::1"}) == "[fe80::1]:48148"
    assert masters_address(Nodes(2, 1), "b:1", {"MASTER_ADDR": "a"}) == "b:1"
    with pytest.raises(PlanError, match="give --master HOST:PORT, or set MASTER_ADDR"):
        masters_address(Nodes(2, 1), None, {})


def test_torch_store() -> None:
    host, port = ranks.store_address(Nodes(), None, {})
    assert (host, 0 < int(port) < 65536) == ("127.0.0.1", True)
    assert ranks.store_address(Nodes(), "far:48148", {})[0] == "127.0.0.1", "rank 0 is on this machine"
    assert ranks.store_address(Nodes(2, 1), "a:48148,b:48148", {}) == ("a", "29500")
    assert ranks.store_address(Nodes(2, 1), "[fe80::1]:48148", {}) == ("fe80::1", "29500")
    assert ranks.store_address(Nodes(2, 1), "a:48148", {"MASTER_ADDR": "c", "MASTER_PORT": "1"}) == ("c", "1")
    assert ranks.store_address(Nodes(), None, {"MASTER_ADDR": "c", "MASTER_PORT": "1"}) == ("c", "1")
    assert ranks.store_address(Nodes(2, 0), None, {})[1] == "29500"


def test_default_run_name_keeps_launches_apart_and_is_the_same_on_all_nodes() -> None:
    alone, another = (ranks.run_name(Nodes(), None, None, "dir/train.py", {}) for _ in range(2))
    assert alone.startswith("train.py-")
    assert alone != another
    assert {ranks.run_name(Nodes(2, 1), None, "a:1", path, {}) for path in ("train.py", "/x/train.py")} == {"train.py"}
    assert ranks.run_name(Nodes(), None, "a:1", "train.py", {}) == ""
    assert ranks.run_name(Nodes(), None, None, "train.py", {"PCCL_RUN": "r"}) == "r"
    assert ranks.run_name(Nodes(), "mine", "a:1", "train.py", {"PCCL_RUN": "r"}) == "mine"
