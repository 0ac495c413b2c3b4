"""The audit of samplers' logs: no problem in sound logs, and each kind of damage found."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pccl.tools import audit
from pccl.training import ElasticSampler
from tests.training.data.sampler_group import Group

SIZE = 61


def run(logs: Path, *, epochs: int = 3, deaths: float = 0.08, **options: Any) -> list[Path]:
    """The logs of a group under churn."""
    choice = random.Random(4)
    group = Group(SIZE, choice, logs=logs, **options)
    group.admit(3)
    while group.epoch < epochs:
        group.step(deaths)
        if len(group.members) < 3:
            group.drain()
            group.admit(2)
    return sorted(logs.iterdir())


@pytest.mark.parametrize("options", [{}, {"quota": 2}, {"lag": 1}, {"quota": 2, "lag": 1}, {"shuffle": False}])
def test_churn_passes_audit(tmp_path: Path, options: dict[str, Any]) -> None:
    found = audit.audit(run(tmp_path, **options))
    assert found.problems == []
    assert found.epochs >= 3
    assert found.dataset_size == SIZE
    assert found.used >= 3 * SIZE
    assert found.given_up >= found.again > 0


def test_audit_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = run(tmp_path, deaths=0.0)
    assert audit.main(list(map(str, logs))) == 0
    report = capsys.readouterr().out
    assert "3 epochs of 61 samples are complete" in report
    assert "each sample in each complete epoch was used exactly once" in report


def changed(path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    events = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(event) + "\n" for event in events if event is not None))


def problems_after(logs: list[Path], change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> str:
    for path in logs:
        changed(path, change)
    return "\n".join(audit.audit(logs).problems)


def test_wrong_sample_is_found(tmp_path: Path) -> None:
    def another(event: dict[str, Any]) -> dict[str, Any]:
        if event.get("drawn") == 2:
            event["samples"][0] = (event["samples"][0] + 1) % SIZE
        return event

    report = problems_after(run(tmp_path, deaths=0.0), another)
    assert "step 2: peer" in report
    assert "has drawn samples other than those that the seed places at positions" in report


def test_missing_draw_is_found(tmp_path: Path) -> None:
    logs = run(tmp_path, deaths=0.0)
    report = problems_after(
        logs, lambda event: None if event.get("drawn") == 1 and len(event["samples"]) > 0 else event
    )
    assert "step 1: peer" in report
    assert "is its log missing?" in report


def test_missing_log_is_named(tmp_path: Path) -> None:
    logs = run(tmp_path, deaths=0.0)
    name = next(json.loads(line)["by"] for line in logs[0].read_text().splitlines() if "by" in line)
    assert f"peer {name} took part, but no log has its draws" in "\n".join(audit.audit(logs[1:]).problems)


def test_missing_step_is_found(tmp_path: Path) -> None:
    report = problems_after(run(tmp_path, deaths=0.0), lambda event: None if event.get("step") == 2 else event)
    assert "step 2, which led to" in report
    assert "is in no log" in report


def test_forged_step_is_found(tmp_path: Path) -> None:
    def twice(event: dict[str, Any]) -> dict[str, Any]:
        if event.get("step") == 3:
            name = next(name for name, ranges in event["used"].items() if ranges)
            event["used"][name] = [[0, 2]]
        return event

    report = problems_after(run(tmp_path, deaths=0.0), twice)
    assert "step 3: its positions do not match its hash" in report
    assert "but the other peers recorded [(0, 2)]" in report


def test_rolled_back_steps_do_not_count(tmp_path: Path) -> None:
    sampler = ElasticSampler(SIZE, batch_size=4, log=tmp_path / "1.jsonl")
    sampler.regroup(None)
    checkpoint = {}
    for number in range(20):
        if number == 8:
            checkpoint = sampler.state_dict()
        next(iter(sampler))
        sampler.claim(None)
        sampler.commit()
    resumed = ElasticSampler(SIZE, batch_size=5, log=tmp_path / "1.jsonl")
    resumed.load_state_dict(checkpoint)
    resumed.regroup(None)
    for _ in range(20):
        next(iter(resumed))
        resumed.claim(None)
        resumed.commit()
    found = audit.audit([tmp_path / "1.jsonl"])
    assert found.problems == []
    assert (found.steps, found.used) == (28, 8 * 4 + 20 * 5)
    assert found.rolled_back == 12
    assert "12 steps did not lead to the last state" in str(found)


def test_invalid_logs_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "other").write_text('{"hello": 1}\n')
    ElasticSampler(5, log=tmp_path / "five")
    ElasticSampler(6, log=tmp_path / "six")
    for names, expected in (
        (["empty"], "from one data stream (size, seed, shuffled); found: none"),
        (["text"], "line 1: not a valid sampler log line"),
        (["other"], "line 1: not a valid sampler log line"),
        (["five", "six"], "found: (5, 0, True), (6, 0, True)"),
        (["nothing"], "No such file"),
    ):
        assert audit.main([str(tmp_path / name) for name in names]) == 2
        assert expected in capsys.readouterr().err


def test_incomplete_line_is_ignored(tmp_path: Path) -> None:
    logs = run(tmp_path, deaths=0.0)
    with logs[0].open("a") as file:
        file.write('{"drawn":99,"by":"')
    assert audit.audit(logs).problems == []


def test_sample_used_twice(tmp_path: Path) -> None:
    def twice(event: dict[str, Any]) -> dict[str, Any]:
        if event.get("drawn") == 3 and event["positions"]:
            event["positions"] = [[0, len(event["samples"])]]
        return event

    assert re.search(r"was used \d times in epoch 0", problems_after(run(tmp_path, deaths=0.0), twice))
