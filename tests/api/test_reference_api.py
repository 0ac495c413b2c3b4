"""Scripts written for the reference API run unchanged: its names, its argument names, its usual loop."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pccl
from pccl import MasterNode
from tests.support.cluster import WAIT_S

SCRIPT = Path(__file__).resolve().parents[1] / "processes" / "reference_script.py"


@pytest.mark.parametrize("library", ["numpy", pytest.param("torch", marks=pytest.mark.slow)])
def test_the_usual_loop(library: str) -> None:
    if library == "torch":
        pytest.importorskip("torch")
    master = MasterNode(listen_address="127.0.0.1:0")
    master.run()
    peers = [
        subprocess.Popen(
            [sys.executable, "-P", str(SCRIPT), master.address, "3", library],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        for _ in range(3)
    ]
    try:
        said = [peer.communicate(timeout=WAIT_S) for peer in peers]
    finally:
        for peer in peers:
            peer.kill()
            peer.communicate()
        master.interrupt()
    assert [peer.returncode for peer in peers] == [0, 0, 0], said
    assert len({stdout for stdout, _ in said}) == 1, said
    assert said[0][0].split()[2] == "6"


@pytest.mark.parametrize(
    ("callable_", "arguments"),
    [
        (pccl.Communicator, ["address", "peer_group", "connections"]),
        (pccl.Communicator.connect, ["n_attempts"]),
        (pccl.Communicator.get_attribute, ["attribute"]),
        (pccl.Communicator.sync_shared_state, ["shared_state", "strategy"]),
        (pccl.Communicator.all_reduce_multiple_with_retry, ["descriptors", "max_in_flight"]),
        (pccl.ReduceDescriptor, ["count", "op", "tag", "operand_descriptor", "quantization_options"]),
        (pccl.ReduceOpDescriptor.from_torch, ["send", "recv", "reduce_descriptor"]),
        (pccl.ReduceOpDescriptor.from_numpy, ["send", "recv", "reduce_descriptor"]),
        (pccl.ReduceOperandDescriptor, ["datatype", "distribution_hint"]),
        (pccl.QuantizationOptions, ["quantized_datatype", "algorithm"]),
        (pccl.TensorInfo.from_torch, ["tensor", "name", "allow_content_inequality"]),
        (pccl.MasterNode, ["listen_address"]),
        (pccl.PCCLError, ["result", "func_name"]),
        (pccl.SharedStateSyncInfo, ["tx_bytes", "rx_bytes"]),
        (pccl.ReduceInfo, ["local_world_size", "tx_bytes", "rx_bytes"]),
    ],
)
def test_arguments_have_the_names_and_order_of_the_reference(
    callable_: Callable[..., Any], arguments: list[str]
) -> None:
    names = [name for name in inspect.signature(callable_).parameters if name != "self"]
    assert names[: len(arguments)] == arguments


@pytest.mark.parametrize("name", ["all_reduce", "all_reduce_async"])
def test_keywords_of_the_reference_are_accepted(name: str) -> None:
    parameters = inspect.signature(getattr(pccl.Communicator("127.0.0.1:9"), name)).parameters
    assert {"send", "recv", "op", "tag", "operand_descriptor", "quantization_options"} <= set(parameters)
    assert not pccl.Communicator("127.0.0.1:9", 0, p2p_connection_pool_size=3).is_connected
    options = pccl.CommunicatorOptions(site="s", site_size=2)
    assert not pccl.Communicator("127.0.0.1:9", options=options, listen="127.0.0.1:0").is_connected


@pytest.mark.parametrize(
    ("enumeration", "names"),
    [
        (pccl.Attribute, "GLOBAL_WORLD_SIZE LOCAL_WORLD_SIZE NUM_DISTINCT_PEER_GROUPS LARGEST_PEER_GROUP_WORLD_SIZE"),
        (pccl.SharedStateSyncStrategy, "ENFORCE_POPULAR RECEIVE_ONLY SEND_ONLY"),
        (pccl.DistributionHint, "NONE NORMAL UNIFORM"),
        (pccl.QuantizationAlgorithm, "NONE MIN_MAX ZERO_POINT_SCALE"),
        (pccl.ReduceOp, "SUM AVG PROD MAX MIN"),
        (
            pccl.DataType,
            "UINT8 INT8 UINT16 INT16 UINT32 INT32 UINT64 INT64 FLOAT16 BFLOAT16 FLOAT DOUBLE",
        ),
        (
            pccl.Result,
            "SUCCESS NOT_INITIALIZED INTERNAL_ERROR INVALID_ARGUMENT INVALID_USAGE TOO_FEW_PEERS "
            "MASTER_CONNECTION_FAILED RANK_CONNECTION_FAILED RANK_CONNECTION_LOST NO_SHARED_STATE_AVAILABLE "
            "PENDING_ASYNC_OPS UPDATE_TOPOLOGY_FAILED TOPOLOGY_OPTIMIZATION_FAILED",
        ),
    ],
)
def test_enumerations_have_the_members_of_the_reference(enumeration: Any, names: str) -> None:
    assert set(names.split()) <= set(enumeration.__members__)


def test_the_enum_defaults_are_those_of_the_reference() -> None:
    options = pccl.QuantizationOptions()
    assert (options.quantized_datatype, options.algorithm) == (pccl.DataType.UINT8, pccl.QuantizationAlgorithm.MIN_MAX)
    assert pccl.ReduceOperandDescriptor(pccl.DataType.FLOAT).distribution_hint is pccl.DistributionHint.NONE
    error = pccl.PCCLError(pccl.Result.TOO_FEW_PEERS, "all_reduce")
    assert (error.result, str(error)) == (pccl.Result.TOO_FEW_PEERS, "all_reduce: TOO_FEW_PEERS")
