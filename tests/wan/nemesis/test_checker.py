"""Every kind of broken promise, made by hand in a history that is otherwise good, is found; a good one passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.wan.nemesis import checker, values
from tests.wan.nemesis.history import Event
from tests.wan.nemesis.values import Load, Op, State

SEED = 5
LOAD = Load(ops=4, small_max=8, large=4, state_bytes=8192)
PEERS = ("1.1", "2.1", "3.1")
NUMBERS = (4, 7, 9)
LABEL = "1.1/1"
STEPS = 3
History = dict[str, list[Event]]


def good() -> History:
    """Three peers make three steps; in the first the first op is aborted once on all of them."""
    histories: History = {peer: [] for peer in PEERS}
    states = {peer: State(LOAD.state_bytes) for peer in PEERS}
    now = iter(np.arange(0.0, 1000.0, 0.01).tolist())

    def say(peer: str, event: str, **what: Any) -> None:
        histories[peer].append(Event(next(now), peer, event, what))

    for peer, number in zip(PEERS, NUMBERS, strict=True):
        say(peer, "start")
        say(peer, "lineage", label=f"{peer}/1", base=None, revision=0)
        say(peer, "joined", number=number)
    for peer in PEERS:
        digests = {"chain": states[peer].chain.tobytes().hex(), "bulk": values.digest(states[peer].bulk)}
        say(peer, "synced", label=LABEL, revision=0, **digests)
    for step in range(STEPS):
        applied: list[tuple[int, str]] = []
        for op in values.ops_of_step(SEED, step, LOAD):
            for verdict in ("RANK_CONNECTION_LOST", "committed") if step == op.tag == 0 else ("committed",):
                for peer, number in zip(PEERS, NUMBERS, strict=True):
                    given = values.digest(values.contribution(SEED, peer, LABEL, step, op))
                    say(peer, "launch", op=op.tag, label=LABEL, step=step, number=number, input=given)
                for rank, peer in enumerate(PEERS):
                    say(peer, "end", **_end(op, step, rank, peer, verdict))
            if op.is_applied:
                applied.append((op.tag, histories[PEERS[0]][-1].what["output"]))
        for peer in PEERS:
            states[peer].advance(step, applied)
            digests = {"chain": states[peer].chain.tobytes().hex(), "bulk": values.digest(states[peer].bulk)}
            say(peer, "state", label=LABEL, revision=step + 1, applied=applied, **digests)
    return histories


def _end(op: Op, step: int, rank: int, peer: str, verdict: str) -> dict[str, Any]:
    given = [values.contribution(SEED, each, LABEL, step, op) for each in PEERS]
    own = values.digest(given[rank])
    what = {"op": op.tag, "label": LABEL, "step": step, "verdict": verdict, "input": own}
    if verdict != "committed":
        return {**what, "text": "peer 3 was lost"}
    result = values.result(op, given, rank)
    sample = [] if op.is_exact else values.sample(result)
    more = {"peers": list(NUMBERS), "rank": rank, "world": 3, "output": values.digest(result), "sample": sample}
    return {**what, **more}


def rules(histories: History) -> set[str]:
    found, _ = checker.check(histories, SEED, LOAD)
    return {each.rule for each in found}


def changed(histories: History, peer: str, chosen: Callable[[Event], bool], **what: Any) -> History:
    """The same with other facts in this peer's last event of those that are chosen; None: without the event."""
    events = histories[peer]
    at = max(index for index, event in enumerate(events) if chosen(event))
    if what:
        events[at] = dataclasses.replace(events[at], what={**events[at].what, **what})
    else:
        del events[at]
    return histories


def ended(histories: History, peer: str) -> History:
    """The same without this peer's last state: it has gone after its last op."""
    assert histories[peer][-1].kind == "state"
    del histories[peer][-1]
    return histories


def committed(event: Event, exact: bool | None = None, kind: str = "") -> bool:
    if event.kind != "end" or event.what["verdict"] != "committed":
        return False
    op = values.ops_of_step(SEED, event.what["step"], LOAD)[event.what["op"]]
    return (exact is None or op.is_exact == exact) and kind in ("", op.kind)


def aborted(event: Event) -> bool:
    return event.kind == "end" and event.what["verdict"] == "RANK_CONNECTION_LOST"


def test_good_history() -> None:
    found, counts = checker.check(good(), SEED, LOAD)
    assert found == []
    assert (counts.ops, counts.aborts, counts.sessions) == (STEPS * 5, 3, 3)
    assert any(not op.is_exact for step in range(STEPS) for op in values.ops_of_step(SEED, step, LOAD))


@pytest.mark.parametrize(
    "verdict", ["RANK_CONNECTION_LOST", "TIMEOUT", "TOO_FEW_PEERS", "INVALID_ARGUMENT"], ids=lambda each: str(each)
)
def test_abort_and_commit(verdict: str) -> None:
    assert rules(ended(changed(good(), "2.1", committed, verdict=verdict, text=""), "2.1")) == {"verdict"}


@pytest.mark.parametrize("verdict", sorted(checker.INDEFINITE))
def test_indefinite_end(verdict: str) -> None:
    assert rules(ended(changed(good(), "2.1", committed, verdict=verdict, text=""), "2.1")) == set()


def test_op_without_end() -> None:
    histories = good()
    histories["3.1"] = histories["3.1"][:-2]  # killed in the middle of its last op
    assert histories["3.1"][-1].kind == "launch"
    assert rules(histories) == set()


def test_other_participants() -> None:
    assert rules(changed(good(), "2.1", committed, peers=[4, 7], world=2)) == {"verdict"}


def test_participant_without_launch() -> None:
    histories = good()
    histories["3.1"] = [event for event in histories["3.1"] if event.what.get("step") != 2 and event.kind != "state"]
    assert rules(histories) == {"verdict"}


def test_duplicate_number() -> None:
    assert "verdict" in rules(changed(good(), "2.1", lambda event: event.kind == "launch", number=4))


def test_commit_before_launch() -> None:
    histories = good()
    at = max(index for index, event in enumerate(histories["3.1"]) if event.kind == "launch")
    histories["3.1"][at] = dataclasses.replace(histories["3.1"][at], at_s=9999.0)
    assert "real time" in rules(histories)


def test_commit_before_relaunch() -> None:
    """What the last one has launched before was aborted, so it is not a launch of what was committed."""
    histories = good()
    ends = [event for event in histories["1.1"] if event.kind == "end" and event.what["op"] == 0]
    assert [event.what["verdict"] for event in ends[:2]] == ["RANK_CONNECTION_LOST", "committed"]
    again = [
        at for at, event in enumerate(histories["3.1"]) if (event.what.get("step"), event.what.get("op")) == (0, 0)
    ]
    for place, at in enumerate(again[2:]):
        later_s = ends[1].at_s + 0.001 * (1 + place)
        histories["3.1"][at] = dataclasses.replace(histories["3.1"][at], at_s=later_s)
    assert rules(histories) == {"real time"}


def test_open_op_at_next_step() -> None:
    histories = changed(good(), "2.1", lambda event: committed(event) and event.what["step"] == 1)
    assert "order" in rules(histories)


def test_other_bytes_on_one_peer() -> None:
    histories = changed(good(), "2.1", lambda event: committed(event, kind="all_reduce"), output="00")
    assert "bytes" in rules(histories)


def test_wrong_bytes_on_all_peers() -> None:
    histories = good()
    for peer in PEERS:
        changed(histories, peer, lambda event: committed(event, exact=True), output="00")
    assert "sum" in rules(histories)


def test_wrong_sample() -> None:
    histories = good()
    for peer in PEERS:
        changed(histories, peer, lambda event: committed(event, exact=False), sample=[1e6] * (values.SAMPLED + 2))
    assert rules(histories) == {"sum"}


def test_samples() -> None:
    result = np.arange(1000)
    assert values.sample(result)[:1] == [0.0]
    assert values.sample(result)[values.SAMPLED - 1 :] == [999.0, 0.0, 999.0]
    result[17] = -5
    assert -5 in values.sample(result)
    assert values.sample(np.zeros(1)) == [0.0, 0.0, 0.0]


def test_input_after_abort() -> None:
    assert rules(changed(good(), "1.1", aborted, input="00")) == {"input"}


def test_input_after_commit() -> None:
    assert rules(changed(good(), "1.1", committed, input="00")) == {"input"}


def test_steps_go_backwards() -> None:
    histories = good()
    events = histories["1.1"]
    again = [event for event in events if event.what.get("step") == 0 and event.what.get("op") == 1]
    histories["1.1"] = events + [dataclasses.replace(event, at_s=900 + event.at_s) for event in again]
    assert "order" in rules(histories)


def test_end_without_launch() -> None:
    histories = good()
    histories["1.1"] = [event for event in histories["1.1"] if event.kind != "launch" or event.what["step"] != 1]
    assert "order" in rules(histories)


@pytest.mark.parametrize("part", ["chain", "bulk"])
def test_state_differs(part: str) -> None:
    other = "00" * 16
    assert rules(changed(good(), "2.1", lambda event: event.kind == "state", **{part: other})) == {"state"}


def test_state_not_from_applied() -> None:
    histories = good()
    for peer in PEERS:
        changed(histories, peer, lambda event: event.kind == "state", applied=[(0, "11")])
    assert rules(histories) == {"state"}


def applied_otherwise(change: Callable[[int, list[tuple[int, str]]], list[tuple[int, str]]]) -> History:
    """The good history, where all peers apply something else in each step, and agree on that."""
    histories = good()
    for peer in PEERS:
        state = State(LOAD.state_bytes)
        for at, event in enumerate(histories[peer]):
            if event.kind == "state":
                step = event.what["revision"] - 1
                applied = change(step, event.what["applied"])
                state.advance(step, applied)
                digests = {"chain": state.chain.tobytes().hex(), "bulk": values.digest(state.bulk)}
                histories[peer][at] = dataclasses.replace(event, what={**event.what, **digests, "applied": applied})
    return histories


def test_committed_op_is_not_applied() -> None:
    assert rules(applied_otherwise(lambda _, applied: applied)) == set()
    assert rules(applied_otherwise(lambda step, applied: applied[step == 1 :])) == {"state"}


def test_applied_without_commit() -> None:
    assert rules(applied_otherwise(lambda _, applied: [(tag, "11") for tag, _ in applied])) == {"state"}


def test_skipped_revision() -> None:
    assert rules(changed(good(), "2.1", lambda event: event.kind == "state", revision=STEPS + 5)) == {"state"}


def test_sync_to_unknown_state() -> None:
    histories = good()
    for peer in PEERS:
        what = {"label": LABEL, "revision": 77, "chain": "ab" * 16, "bulk": "cd"}
        histories[peer].append(Event(990.0, peer, "synced", what))
    assert rules(histories) == {"state"}


def test_state_differs_after_sync() -> None:
    assert rules(changed(good(), "3.1", lambda event: event.kind == "synced", bulk="00")) == {"state"}


def test_training_replicas_differ() -> None:
    what = {"label": "a", "revision": 3, "world": 2}
    one = Event(1.0, "1.1", "trained", {**what, "digest": "11"})
    assert rules({"1.1": [one], "2.1": [dataclasses.replace(one, peer="2.1")]}) == set()
    other = Event(1.0, "2.1", "trained", {**what, "digest": "22"})
    assert rules({"1.1": [one], "2.1": [other]}) == {"state"}


def test_write_after_error() -> None:
    assert rules({"1.1": [Event(1.0, "1.1", "touched", {"text": "written"})]}) == {"input"}


def test_crash() -> None:
    assert rules({"1.1": [Event(1.0, "1.1", "crash", {"text": "ValueError"})]}) == {"crash"}


@pytest.mark.parametrize("what", ["rss", "descriptors", "threads"])
def test_leak(what: str) -> None:
    def usage(at: int, grows: bool) -> Event:
        usual = {"rss": 10**8, "descriptors": 40, "threads": 40}
        return Event(float(at), "1.1", "usage", {**usual, what: usual[what] * (1 + 0.002 * at * grows)})

    assert rules({"1.1": [usage(at, True) for at in range(300)]}) == {"leak"}
    assert rules({"1.1": [usage(at, False) for at in range(300)]}) == set()
