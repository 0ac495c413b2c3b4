"""What the master does grows with the number of peers as it must and no faster, counted in bytecodes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from tests.simulation.scale import Group, measure

FEW, MANY = 20, 200
SLACK = 1.3


def _bytecodes(action: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


def _group(peers: int) -> Group:
    group = Group()
    group.join(1)
    group.join(peers - 1)
    return group


MESSAGES: dict[str, Callable[[Group], m.FromPeer]] = {
    "done": lambda group: m.OpsDone(group.epoch, [m.OpRef(1, 0)]),
    "stalled": lambda group: m.OpsStalled(group.epoch, [m.OpRef(1, 0)]),
    "joint call": lambda group: m.JointCall(1, Kind.UPDATE_TOPOLOGY),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_cost_of_a_message_does_not_depend_on_the_number_of_peers(name: str) -> None:
    groups = [_group(peers) for peers in (FEW, MANY)]
    few, many = (_bytecodes(partial(group.say, 1, MESSAGES[name](group))) for group in groups)
    assert many < few * SLACK


def test_cost_of_an_op_grows_linearly() -> None:
    few, many = (_bytecodes(partial(_group(peers).reduce, 1)) for peers in (FEW, MANY))
    assert many < few * MANY / FEW * SLACK


def test_peers_are_told_only_of_peers_that_they_do_not_know() -> None:
    few, many = measure(FEW)["join"], measure(MANY)["join"]
    assert many.sent / few.sent < MANY / FEW * SLACK
    newcomer_bytes = 100 * MANY
    rings_bytes = 3 * MANY * MANY
    assert many.sent_bytes < rings_bytes + 2 * newcomer_bytes + 100 * MANY
