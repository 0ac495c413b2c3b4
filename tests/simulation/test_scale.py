"""The master's work grows with the number of peers as it must and no faster, counted in bytecodes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import pytest

from pccl.protocol import messages as m
from pccl.protocol.messages import Kind
from tests.simulation.scale import OPTIONS, Group, Takeover, fail_over, measure

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
    "group call": lambda group: m.GroupCall(1, Kind.UPDATE_TOPOLOGY),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_cost_of_a_message_does_not_depend_on_the_number_of_peers(name: str) -> None:
    groups = [_group(peers) for peers in (FEW, MANY)]
    few, many = (_bytecodes(partial(group.say, 1, MESSAGES[name](group))) for group in groups)
    assert many < few * SLACK


def test_cost_of_an_op_grows_linearly() -> None:
    few, many = (_bytecodes(partial(_group(peers).reduce, 1)) for peers in (FEW, MANY))
    assert many < few * MANY / FEW * SLACK


def test_messages_describe_new_peers_only() -> None:
    few, many = measure(FEW)["join"], measure(MANY)["join"]
    assert many.sent / few.sent < MANY / FEW * SLACK
    newcomer_bytes = 100 * MANY
    rings_bytes = 3 * MANY * MANY
    assert many.sent_bytes < rings_bytes + 2 * newcomer_bytes + 100 * MANY


# Failover.


def test_all_of_many_peers_go_on_with_the_next_master() -> None:
    fail_over(500)


def test_busy_master_of_many_peers_loses_no_peer() -> None:
    """Each message takes the master so long that the takeover lasts more than two peer timeouts."""
    peers = 40
    failover = fail_over(peers, step_s=2 * OPTIONS.peer_timeout_s / peers * 0.45)
    assert failover.now > 2 * OPTIONS.peer_timeout_s
    assert failover.machine.deadline() is None


@dataclass
class Counted(Takeover):
    """Counts what each report costs the master."""

    counts: dict[type, list[int]] = field(default_factory=dict)

    def say(self, connection: int, message: m.FromPeer) -> None:
        count = _bytecodes(partial(super().say, connection, message))
        self.counts.setdefault(type(message), []).append(count)


def test_what_a_report_costs_does_not_depend_on_the_number_of_peers() -> None:
    """But the first of a kind, which tells of rings that are new, and the last, after the run is led again."""
    few, many = Counted(FEW), Counted(MANY)
    for failover in (few, many):
        failover.run()
    assert many.counts.keys() == {m.Resume, m.PreVote, m.Vote, m.HeartbeatHello}
    for kind in many.counts:
        assert max(many.counts[kind][MANY // 2 + 5 : -1]) < max(few.counts[kind][FEW // 2 + 5 : -1]) * SLACK
        assert max(many.counts[kind][1 : MANY // 2 - 5]) < max(few.counts[kind][1 : FEW // 2 - 5]) * SLACK


def test_cost_of_a_failover_grows_linearly() -> None:
    few, many = (_bytecodes(partial(fail_over, peers)) for peers in (FEW, MANY))
    assert many < few * MANY / FEW * SLACK
