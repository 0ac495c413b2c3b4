"""The demo's verdict: passes on a good run, and each thing that can go wrong fails exactly its own check."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from pccl.tools.demo.plan import Plan
from pccl.tools.demo.report import (
    Display,
    Event,
    Joined,
    Killed,
    Report,
    Row,
    Survivor,
    draw_plot,
)
from pccl.tools.report import PlanError, ToolError, check_outputs, write_json

PLAN = Plan(peers=3, steps=6)  # peer 2 is killed in step 2, peer 3 joins in step 4
WORLDS = [3, 3, 2, 2, 3, 3, 3]
LOST = Event("lost", "peer 2 lost", 2)
JOINED = Event("joined", "peer 3 joined", 3)


def _good() -> dict[str, Any]:
    events = {2: [LOST, Event("retried", "2 all-reduces aborted and retried")], 4: [JOINED]}
    return {
        "plan": PLAN,
        "unigram_bits": 4.7,
        "rows": [
            Row(step, 8 - 0.8 * step, world, 10**6, 10**6, 0.5, events.get(step, []))
            for step, world in enumerate(WORLDS)
        ],
        "killed": Killed(peer=2, step=2, launched=2, of=4, aborted={0: 2, 1: 2}),
        "joined": Joined(peer=3, step=4, received_bytes=5000, sync_seconds=0.1),
        "survivors": [Survivor(peer, 6, 6, "ab" * 32) for peer in (0, 1, 3)],
        "problems": [],
        "seconds": 12.0,
    }


def _failed(report: Report) -> list[str]:
    assert report.passed == all(check.passed for check in report.checks)
    return [check.name for check in report.checks if not check.passed]


def _replace_row(facts: dict[str, Any], step: int, **changes: Any) -> None:
    facts["rows"][step] = msgspec.structs.replace(facts["rows"][step], **changes)


def test_good_run() -> None:
    report = Report(**_good())
    assert report.passed
    assert (report.start_bits, report.end_bits) == (8, pytest.approx(3.2))
    assert {check.name for check in report.checks} == {"loss", "parity", "kill", "join", "agreement", "other failures"}


FLAWS: dict[str, tuple[str, Callable[[dict[str, Any]], None]]] = {
    "loss just below the entropy": ("loss", lambda facts: _replace_row(facts, 6, bits_per_byte=4.6)),
    "loss not measured": ("loss", lambda facts: _replace_row(facts, 6, bits_per_byte=None)),
    "a digest differs": ("parity", lambda facts: facts["survivors"].append(Survivor(1, 6, 6, "cd" * 32))),
    "a revision differs": ("parity", lambda facts: facts["survivors"].append(Survivor(1, 6, 5, "ab" * 32))),
    "a survivor is missing": ("parity", lambda facts: facts["survivors"].pop()),
    "no kill": ("kill", lambda facts: facts.update(killed=None)),
    "the victim was not missed": ("kill", lambda facts: _replace_row(facts, 2, world_size=3)),
    "no abort": (
        "kill",
        lambda facts: facts.update(killed=msgspec.structs.replace(facts["killed"], aborted={0: 0, 1: 0})),
    ),
    "no join": ("join", lambda facts: facts.update(joined=None)),
    "the newcomer brought everything along": (
        "join",
        lambda facts: facts.update(joined=msgspec.structs.replace(facts["joined"], received_bytes=0)),
    ),
    "the newcomer was not seen": ("join", lambda facts: _replace_row(facts, 4, events=[])),
    "world sizes differ": ("agreement", lambda facts: _replace_row(facts, 3, agreed=False)),
    "another loss": ("other failures", lambda facts: facts["problems"].append("peer 1 exited unexpectedly")),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_flaws(flaw: str) -> None:
    name, spoil = FLAWS[flaw]
    facts = _good()
    spoil(facts)
    assert _failed(Report(**facts)) == [name]


def test_run_that_never_began() -> None:
    facts = _good() | {"rows": [], "killed": None, "joined": None, "survivors": [], "problems": ["no master"]}
    assert _failed(Report(**facts)) == ["loss", "parity", "kill", "join", "agreement", "other failures"]


@pytest.mark.parametrize(("inner_steps", "end_bits", "passes"), [(10, 7.9, True), (10, 8.1, False), (17, 4.5, False)])
def test_threshold_of_short_runs(inner_steps: int, end_bits: float, passes: bool) -> None:
    facts = _good() | {"plan": Plan(peers=3, steps=6, inner_steps=inner_steps)}
    _replace_row(facts, 6, bits_per_byte=end_bits)
    assert Report(**facts).passed == passes


def test_display_of_80_columns() -> None:
    facts = _good()
    lost = Event("lost", "peer 2 lost: killed with 5 of 5 all-reduces begun", 2)
    joined = Event("joined", "peer 3 joined, synced 11.4 MB in 1234 ms", 3)
    _replace_row(facts, 2, events=[lost, *facts["rows"][2].events], sent_bytes=1234567890, seconds=123.4)
    _replace_row(facts, 4, events=[joined])
    report = Report(**facts)
    output = io.StringIO()
    with closing(Display(Console(file=output, width=80), PLAN)) as display:
        display.page("http://127.0.0.1:12345/")
        for row in report.rows:
            display.row(row)
        display.verdict(report)
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80, lines
    text = " ".join(output.getvalue().split())
    for said in (
        "peer 2 is killed in step 2",
        lost.text,
        joined.text,
        "ab" * 32,
        "peers 0, 1 and 3: shared state",
        "ok",
    ):
        assert said in text
    for check in report.checks:
        assert check.found in text


def test_run_without_kill_and_join() -> None:
    plan = Plan(peers=3, steps=6, kill=False, join=False)
    facts = _good() | {"plan": plan, "killed": None, "joined": None}
    facts["survivors"] = [Survivor(peer, 6, 6, "ab" * 32) for peer in range(3)]
    assert Report(**facts).passed


def test_json(tmp_path: Path) -> None:
    report = Report(**_good())
    path = tmp_path / "facts.json"
    write_json(report, str(path))
    facts = json.loads(path.read_text())
    assert facts["passed"] is True
    assert facts["plan"]["peers"] == 3
    assert facts["rows"][2]["events"][0] == {"kind": "lost", "text": "peer 2 lost", "peer": 2}
    assert facts["killed"]["aborted"] == {"0": 2, "1": 2}
    assert [survivor["peer"] for survivor in facts["survivors"]] == [0, 1, 3]
    again = msgspec.json.decode(path.read_text(), type=Report)
    assert again == report


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_plot(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"curve.{kind}"
    facts = _good()
    _replace_row(facts, 3, bits_per_byte=None)
    draw_plot(Report(**facts), str(path))
    assert path.stat().st_size > 5000
    if kind == "svg":
        for text in ("unigram entropy of the text", "outer step"):
            assert text in path.read_text()


@pytest.mark.parametrize("name", ["curve", "curve.docx", "no/such/folder/curve.png"])
def test_invalid_plot_files(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ToolError, match="curve"):
        check_outputs(None, str(tmp_path / name))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"peers": 0}, "--peers 0"),
        ({"peers": 1}, "--no-kill"),
        ({"steps": 1}, "--no-join"),
        ({"inner_steps": 0}, "--inner-steps 0"),
        ({"seed": -1}, "--seed -1"),
        ({"step_timeout_s": 0.0}, "--step-timeout 0"),
    ],
)
def test_invalid_plans(options: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Plan(**options).check()
