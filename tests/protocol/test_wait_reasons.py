"""Warnings of long waits: when, the reason, and the names of processes."""

from __future__ import annotations

from pccl.protocol.messages import Kind
from pccl.protocol.status import Course, Finding, GroupStatus, MemberStatus, RunStatus, Totals, Waiting
from pccl.protocol.wait_reasons import FIRST_S, LinkWait, LongWait, explain_op, explain_pair, explain_wait


def test_warning_intervals_grow() -> None:
    wait = LongWait("connect", 100.0)
    warned = [t for t in range(100, 1200) if wait.is_due(t)]
    assert warned == [110, 130, 190, 370, 910]
    assert wait.due_at == 100 + 2430


def test_late_look_gives_one_warning() -> None:
    wait = LongWait("connect", 0.0)
    assert wait.is_due(100 * FIRST_S)
    assert not wait.is_due(100 * FIRST_S + 1)


def member(peer: int, call: str = "", missing: tuple[int, ...] = (), due_s: float | None = None) -> MemberStatus:
    wait = Waiting(call, 12.0, list(missing)) if call else None
    return MemberStatus(peer, f"vm:{peer}", 0, "h:1", "accepted", 60.0, wait, answer_due_s=due_s)


def run(*members: MemberStatus, is_syncing: bool = False, findings: tuple[str, ...] = ()) -> RunStatus:
    group = GroupStatus(0, [each.peer for each in members], 1, "running", True, None, 0, is_syncing)
    found = [Finding("straggler", 1, 0, text, 1.0) for text in findings]
    return RunStatus(
        "r", 1, "1", 1.0, 5.0, 1, False, [group], list(members), Totals(), Course(1.0, []), [], [], findings=found
    )


TOPOLOGY, SYNC = Kind.UPDATE_TOPOLOGY, Kind.SYNC


def test_missing_callers_are_named() -> None:
    status = run(member(1, TOPOLOGY, (2, 3)), member(2, SYNC, (1, 3)), member(3))
    assert explain_wait(status, 1, TOPOLOGY) == (
        "peers 2 (vm:2), 3 (vm:3), which have not called update_topology (2 is in sync_shared_state)"
    )
    status = run(member(1, TOPOLOGY, (2,)), member(2), findings=("peer 2 (vm:2) is slow",))
    assert explain_wait(status, 1, TOPOLOGY) == (
        "peer 2 (vm:2), which has not called update_topology (the master has found: peer 2 (vm:2) is slow)"
    )


def test_complete_calls() -> None:
    assert "peer 2 (vm:2) to answer the master" in explain_wait(
        run(member(1, TOPOLOGY), member(2, TOPOLOGY, due_s=3.0)), 1, TOPOLOGY
    )
    assert "all peers that lack the shared state to fetch it" in explain_wait(
        run(member(1, SYNC), member(2, SYNC), is_syncing=True), 1, SYNC
    )
    reason = explain_wait(run(member(1, SYNC), member(2, SYNC)), 1, SYNC)
    assert reason == "the master, because all peers have called it"
    assert "a master that knows this peer" in explain_wait(run(member(2)), 1, SYNC)


def test_newcomer_waits_for_update_topology() -> None:
    assert explain_wait(run(member(1, TOPOLOGY), member(2, SYNC), member(3)), 0, "") == (
        "the peers of the run, which have yet to admit this one by calling update_topology: "
        "peers 2 (vm:2), 3 (vm:3) (2 is in sync_shared_state)"
    )
    assert explain_wait(run(member(1, TOPOLOGY)), 0, "") == "the view that admits this one"


NOTHING = LinkWait(0, 0, 0, 0)


def name_of(peer: int) -> str:
    return f"vm:{peer}"


def test_op_names_the_peers_that_have_not_called_it() -> None:
    waits = {1: NOTHING, 2: LinkWait(1, 1, 0, 0), 3: LinkWait(0, 1, 0, 0)}
    assert explain_op(waits, name_of) == "peer 2 (vm:2), which has not called it"


def test_op_names_the_peers_whose_data_is_missing() -> None:
    waits = {1: LinkWait(0, 1, 0, 0), 2: LinkWait(0, 1, 0, 2400)}
    assert explain_op(waits, name_of) == (
        "peers 1 (vm:1), 2 (vm:2), which have yet to send data, or to pass it on; "
        "peer 2 (vm:2) has not acknowledged data for 2.4 s"
    )
    assert "peer 5 (vm:5), which has not reported that it is done" in explain_op({5: LinkWait(0, 0, 1, 0)}, name_of)


def test_send_names_its_receiver() -> None:
    assert "peer 3 (vm:3) has not acknowledged data for 1.0 s" in explain_pair(
        3, True, {3: LinkWait(0, 0, 0, 1000)}, name_of
    )
