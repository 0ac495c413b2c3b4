"""Wrong values for every parameter of the public calls: each is a PCCLError that names the parameter, and changes
nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pccl import (
    Communicator,
    DataType,
    MasterNode,
    PCCLError,
    ReduceDescriptor,
    ReduceOp,
    ReduceOpDescriptor,
    ReduceOperandDescriptor,
    Result,
    SharedState,
    TensorInfo,
)
from pccl.flight_recorder import Trace, collect, cut, load, save
from pccl.status import run_status

SUM = ReduceOp.SUM
HUGE = 2**200
THING = object()
EMPTY = Trace("", "", [])


def x() -> Any:
    return np.ones(4, np.float32)


def read_only() -> Any:
    array = x()
    array.flags.writeable = False
    return array


def state() -> SharedState:
    return SharedState.from_numpy({"x": x()})


@pytest.fixture(scope="module")
def peer() -> Iterator[Communicator]:
    """Alone: a wrong argument is told before that."""
    with MasterNode("127.0.0.1:0") as node, Communicator(node.address) as one:
        yield one


ARRAYS = [None, "x", -1, 1.5, THING, HUGE, [1.0], np.ones((4, 4), np.float32)[:, 1], np.array([THING]), np.float32(1)]
REDUCIBLE = [*ARRAYS, np.zeros(3, np.complex64), np.zeros(3, "M8[s]"), np.zeros(3, ">f4"), np.zeros(3, "U2")]
RANKS = [None, "x", -1, 1.5, THING, HUGE, True]
TAGS = [None, "x", -1, 1.5, THING, HUGE, True, math.nan]
OPS = [None, "x", 1.5, THING, HUGE, DataType.FLOAT]
ALGORITHMS = ["x", -1, 1.5, THING, HUGE]
TIMEOUTS = ["x", THING, math.nan]
QUANTIZATIONS = ["x", -1, 1.5, THING, HUGE, SUM, DataType.UINT8]

Case = tuple[str, list[Any], Callable[[Communicator, Any], object]]

CALLS: dict[str, list[Case]] = {
    "all_reduce": [
        ("send", [*REDUCIBLE, read_only()], lambda peer, v: peer.all_reduce(v, op=SUM)),
        (
            "recv",
            [*REDUCIBLE[1:], read_only(), np.ones(3, np.float32)],
            lambda peer, v: peer.all_reduce(x(), v, op=SUM),
        ),
        ("op", OPS, lambda peer, v: peer.all_reduce(x(), op=v)),
        ("tag", TAGS, lambda peer, v: peer.all_reduce(x(), op=SUM, tag=v)),
        ("operand_descriptor", QUANTIZATIONS, lambda peer, v: peer.all_reduce(x(), op=SUM, operand_descriptor=v)),
        (
            "operand_descriptor",
            [ReduceOperandDescriptor(v) for v in (None, "x", DataType.DOUBLE)],  # type: ignore[arg-type]
            lambda peer, v: peer.all_reduce(x(), op=SUM, operand_descriptor=v),
        ),
        ("quantization_options", QUANTIZATIONS, lambda peer, v: peer.all_reduce(x(), op=SUM, quantization_options=v)),
        ("algorithm", ALGORITHMS, lambda peer, v: peer.all_reduce(x(), op=SUM, algorithm=v)),
        ("timeout", TIMEOUTS, lambda peer, v: peer.all_reduce(x(), op=SUM, timeout=v)),
    ],
    "all_reduce_async": [
        ("send", [*REDUCIBLE, read_only()], lambda peer, v: peer.all_reduce_async(v, op=SUM)),
        ("op", OPS, lambda peer, v: peer.all_reduce_async(x(), op=v)),
        ("tag", TAGS, lambda peer, v: peer.all_reduce_async(x(), op=SUM, tag=v)),
        (
            "quantization_options",
            QUANTIZATIONS,
            lambda peer, v: peer.all_reduce_async(x(), op=SUM, quantization_options=v),
        ),
    ],
    "all_gather": [
        ("send", ARRAYS, lambda peer, v: peer.all_gather(v)),
        ("recv", [*ARRAYS[1:], read_only()], lambda peer, v: peer.all_gather(x(), v)),
        ("tag", TAGS, lambda peer, v: peer.all_gather(x(), tag=v)),
        ("algorithm", ALGORITHMS, lambda peer, v: peer.all_gather(x(), algorithm=v)),
        ("timeout", TIMEOUTS, lambda peer, v: peer.all_gather(x(), timeout=v)),
    ],
    "reduce_scatter": [
        ("send", REDUCIBLE, lambda peer, v: peer.reduce_scatter(v, op=SUM)),
        ("recv", [*ARRAYS[1:], read_only()], lambda peer, v: peer.reduce_scatter(x(), v, op=SUM)),
        ("op", OPS, lambda peer, v: peer.reduce_scatter(x(), op=v)),
    ],
    "broadcast": [
        ("array", ARRAYS, lambda peer, v: peer.broadcast(v, root=0)),
        ("root", ["x", None, 1.5, THING, True], lambda peer, v: peer.broadcast(x(), root=v)),
        ("tag", TAGS, lambda peer, v: peer.broadcast(x(), root=0, tag=v)),
    ],
    "send": [
        ("array", ARRAYS, lambda peer, v: peer.send(v, dst=0)),
        ("dst", RANKS, lambda peer, v: peer.send(x(), dst=v)),
    ],
    "recv": [
        ("array", [*ARRAYS, read_only(), b"abc"], lambda peer, v: peer.recv(v, src=0)),
        ("src", RANKS, lambda peer, v: peer.recv(x(), src=v)),
    ],
    "barrier": [("tag", TAGS, lambda peer, v: peer.barrier(tag=v))],
    "all_reduce_multiple_with_retry": [
        (
            "descriptors",
            [None, "x", -1, THING, [], [None], ["x"]],
            lambda peer, v: peer.all_reduce_multiple_with_retry(v),
        ),
        (
            "max_in_flight",
            [None, "x", 0, -1, 1.5, THING, True],
            lambda peer, v: peer.all_reduce_multiple_with_retry(
                [ReduceOpDescriptor.from_numpy(x(), x(), ReduceDescriptor(4, SUM))], max_in_flight=v
            ),
        ),
    ],
    "ReduceOpDescriptor.from_numpy": [
        ("reduce_descriptor", QUANTIZATIONS, lambda peer, v: ReduceOpDescriptor.from_numpy(x(), x(), v)),
        (
            "count",
            ["x", -1, 1.5, THING, HUGE, True],
            lambda peer, v: ReduceOpDescriptor.from_numpy(x(), x(), ReduceDescriptor(v, SUM)),
        ),
    ],
    "get_attribute": [("attribute", [None, "x", -1, THING, HUGE], lambda peer, v: peer.get_attribute(v))],
    "group calls": [
        ("timeout", TIMEOUTS, lambda peer, v: peer.are_peers_pending(timeout=v)),
        ("timeout", TIMEOUTS, lambda peer, v: peer.update_topology(timeout=v)),
        ("timeout", TIMEOUTS, lambda peer, v: peer.optimize_topology(timeout=v)),
    ],
    "sync_shared_state": [
        ("shared_state", [None, "x", -1, THING, {"x": 1}], lambda peer, v: peer.sync_shared_state(v)),
        ("strategy", [None, "x", -1, THING], lambda peer, v: peer.sync_shared_state(state(), v)),
        ("timeout", TIMEOUTS, lambda peer, v: peer.sync_shared_state(state(), timeout=v)),
    ],
    "SharedState": [
        ("tensors", [None, -1, THING, "x", [None], [x()], []], lambda peer, v: SharedState(v)),
        ("arrays", [None, -1, THING, "x", [x()]], lambda peer, v: SharedState.from_numpy(v)),
        ("tensor", [v for v in REDUCIBLE if v is not None], lambda peer, v: SharedState.from_numpy({"x": v})),
        ("tensors", [None, -1, THING, "x"], lambda peer, v: SharedState.from_torch(v)),
        ("name", [None, "", "a\0b", 5, THING], lambda peer, v: TensorInfo.from_numpy(x(), v)),
        ("revision", [None, "x", -1, 1.5, THING, HUGE, True], lambda peer, v: setattr(state(), "revision", v)),
    ],
    "Communicator": [
        ("address", [None, 5, "", "h:x", THING, "h:70000"], lambda peer, v: Communicator(v)),
        ("peer_group", [None, "x", -1, 1.5, HUGE, True], lambda peer, v: Communicator("h", v)),
        ("p2p_connection_pool_size", [None, "x", -1, 1.5, HUGE], lambda peer, v: Communicator("h", 0, v)),
        ("timeout", TIMEOUTS, lambda peer, v: Communicator("h", timeout=v)),
        ("master_timeout", TIMEOUTS, lambda peer, v: Communicator("h", master_timeout=v)),
        ("advertise", [5, THING, "h:x"], lambda peer, v: Communicator("h", advertise=v)),
        ("listen", [5, THING, "h:x"], lambda peer, v: Communicator("h", listen=v)),
        ("name", [5, THING, "\udce9", "a\x00b"], lambda peer, v: Communicator("h", name=v)),
        ("token", [5, THING], lambda peer, v: Communicator("h", token=v)),
        ("encrypt", ["x", 5, THING], lambda peer, v: Communicator("h", encrypt=v)),
        ("ssl_context", ["x", 5, THING], lambda peer, v: Communicator("h", ssl_context=v)),
        ("segment_bytes", [None, "x", -1, 1.5, HUGE], lambda peer, v: Communicator("h", segment_bytes=v)),
        ("site", [5, THING, "x", "\udce9"], lambda peer, v: Communicator("h", site=v)),
        ("site_size", [None, "x", -1, 1.5, HUGE], lambda peer, v: Communicator("h", site="s", site_size=v)),
        ("n_attempts", ["x", 1.5, THING], lambda peer, v: Communicator("127.0.0.1:1").connect(v)),
    ],
    "MasterNode": [
        ("listen_address", [None, 5, "", "h:x", THING, "h:70000"], lambda peer, v: MasterNode(v)),
        ("peer_timeout", ["x", -1, THING, math.nan], lambda peer, v: MasterNode(peer_timeout=v)),
        ("engine_threads", ["x", -1, 1.5, THING, HUGE], lambda peer, v: MasterNode(engine_threads=v)),
        ("http", [5, THING, "h:x"], lambda peer, v: MasterNode(http=v)),
        ("standby_of", [5, THING, "h:x"], lambda peer, v: MasterNode(standby_of=v)),
        ("token", [5, THING], lambda peer, v: MasterNode(token=v)),
    ],
    "requests": [
        ("timeout", TIMEOUTS, lambda peer, v: run_status("127.0.0.1:1", timeout=v)),
        ("timeout", TIMEOUTS, lambda peer, v: collect("127.0.0.1:1", timeout=v)),
        ("seconds", [None, "x", -1, THING, math.nan, math.inf], lambda peer, v: collect("127.0.0.1:1", seconds=v)),
        ("last", [None, "x", -1, 1.5, THING, HUGE], lambda peer, v: collect("127.0.0.1:1", last=v)),
    ],
    "recordings": [
        ("since_ns", [None, "x", -1, 1.5, THING, HUGE, True], lambda peer, v: peer.flight_recorder(v)),
        ("paths", [None, 3, "abc", THING, [3], [None], [THING]], lambda peer, v: load(v)),
        ("trace", [None, 3, "abc", THING], lambda peer, v: cut(v)),
        ("seconds", [None, "x", -1, THING, math.nan, math.inf], lambda peer, v: cut(EMPTY, v)),
        ("last", [None, "x", -1, 1.5, THING, HUGE], lambda peer, v: cut(EMPTY, 0.0, v)),
        ("recording", [None, 3, "abc", THING], lambda peer, v: save(v, os.devnull)),
        ("path", [None, 3, THING], lambda peer, v: save(peer.flight_recorder(), v)),
    ],
}
TABLE = [
    pytest.param(name, value, call, id=f"{where}-{name}-{number}")
    for where, cases in CALLS.items()
    for name, values, call in cases
    for number, value in enumerate(values)
]


def refused(call: Callable[[], object], name: str, value: Any) -> None:
    with pytest.raises(PCCLError) as caught:
        call()
    assert caught.value.result is Result.INVALID_ARGUMENT, caught.value
    text = str(caught.value)
    words = {name, name.rstrip("s"), repr(value)}
    assert any(word in text for word in words), text


@pytest.mark.parametrize(("name", "value", "call"), TABLE)
def test_it_is_refused_by_name(
    peer: Communicator, name: str, value: Any, call: Callable[[Communicator, Any], object]
) -> None:
    refused(lambda: call(peer, value), name, value)
    assert peer.stats["ops_open"] == 0


@pytest.mark.parametrize("call", [run_status, collect])
def test_requests_without_a_bound_and_with_one_that_has_passed(call: Callable[..., Any]) -> None:
    with MasterNode("127.0.0.1:0") as node, Communicator(node.address):
        assert call(node.address, timeout=None).run
        with pytest.raises(PCCLError, match=r"no answer from .* within 0 s") as caught:
            call(node.address, timeout=-1)
        assert caught.value.result is Result.TIMEOUT


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of what is to change in it
def test_odd_torch_tensors(peer: Communicator) -> None:
    torch = pytest.importorskip("torch")
    plain = torch.ones(4)
    tensors = {
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "sparse": plain.to_sparse(),
        "csr": torch.ones(2, 2).to_sparse_csr(),
        "meta": torch.ones(4, device="meta"),
        "quantized": torch.quantize_per_tensor(plain, 0.1, 0, torch.quint8),
        "conjugate": torch.ones(4, dtype=torch.complex64).conj(),
        "negative": torch.ones(4, dtype=torch.complex64).conj().imag,
        "gaps": torch.ones(4, 4)[:, 1],
        "complex": torch.ones(4, dtype=torch.complex64),
        "bool": torch.ones(4, dtype=torch.bool),
    }
    for tensor in tensors.values():
        refused(lambda tensor=tensor: peer.all_reduce(tensor, op=SUM), "send", None)  # type: ignore[misc]
        refused(lambda tensor=tensor: peer.all_reduce_async(tensor, op=SUM), "send", None)  # type: ignore[misc]
        refused(lambda tensor=tensor: peer.all_reduce(plain, tensor, op=SUM), "recv", None)  # type: ignore[misc]
        refused(lambda tensor=tensor: TensorInfo.from_torch(tensor, "t"), "tensor 't'", None)  # type: ignore[misc]
    for name in ("nested", "jagged", "sparse", "csr", "meta", "quantized", "conjugate", "negative", "gaps"):
        refused(lambda name=name: peer.all_gather(tensors[name]), "send", None)  # type: ignore[misc]
        refused(lambda name=name: peer.broadcast(tensors[name], root=0), "array", None)  # type: ignore[misc]
    assert peer.stats["ops_open"] == 0
