"""The audit finds nothing where everything was in order, and whatever was not."""

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
def test_churn_leaves_nothing_to_complain_of(tmp_path: Path, options: dict[str, Any]) -> None:
    found = audit.audit(run(tmp_path, **options))
    assert found.problems == []
    assert found.epochs >= 3
    assert found.dataset_size == SIZE
    assert found.used >= 3 * SIZE
    assert found.given_up >= found.again > 0


def test_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logs = run(tmp_path, deaths=0.0)
    assert audit.main(list(map(str, logs))) == 0
    told = capsys.readouterr().out
    assert "3 epochs of 61 samples are complete" in told
    assert "each sample of each complete epoch was used exactly once" in told


def changed(path: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    events = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(event) + "\n" for event in events if event is not None))


def problems_after(logs: list[Path], change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> str:
    for path in logs:
        changed(path, change)
    return "\n".join(audit.audit(logs).problems)


def test_a_sample_that_was_another_is_found(tmp_path: Path) -> None:
    def another(event: dict[str, Any]) -> dict[str, Any]:
        if event.get("drawn") == 2:
            event["samples"][0] = (event["samples"][0] + 1) % SIZE
        return event

    told = problems_after(run(tmp_path, deaths=0.0), another)
    assert "step 2: peer" in told
    assert "has drawn other samples than the seed puts at positions" in told


def test_a_draw_too_many_or_too_few_is_found(tmp_path: Path) -> None:
    logs = run(tmp_path, deaths=0.0)
    told = problems_after(logs, lambda event: None if event.get("drawn") == 1 and len(event["samples"]) > 0 else event)
    assert "step 1: peer" in told
    assert "is its log missing?" in told


def test_a_log_that_is_missing_is_named(tmp_path: Path) -> None:
    logs = run(tmp_path, deaths=0.0)
    name = next(json.loads(line)["by"] for line in logs[0].read_text().splitlines() if "by" in line)
    assert f"peer {name} took part, but no log has its draws" in "\n".join(audit.audit(logs[1:]).problems)


def test_a_step_that_is_missing_is_found(tmp_path: Path) -> None:
    told = problems_after(run(tmp_path, deaths=0.0), lambda event: None if event.get("step") == 2 else event)
    assert "step 2, which led to" in told
    assert "is in no log" in told


def test_a_step_that_was_made_up_is_found(tmp_path: Path) -> None:
    def twice(event: dict[str, Any]) -> dict[str, Any]:
        if event.get("step") == 3:
            name = next(name for name, ranges in event["used"].items() if ranges)
            event["used"][name] = [[0, 2]]
        return event

    told = problems_after(run(tmp_path, deaths=0.0), twice)
    assert "step 3: its positions are not those of its link" in told
    assert "but the others have noted [(0, 2)]" in told


def test_steps_that_were_rolled_back_do_not_count(tmp_path: Path) -> None:
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


def test_what_is_no_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "text").write_text("hello\n")
    (tmp_path / "other").write_text('{"hello": 1}\n')
    ElasticSampler(5, log=tmp_path / "five")
    ElasticSampler(6, log=tmp_path / "six")
    for names, expected in (
        (["empty"], "of one data stream (size, seed, shuffled), but there are: none"),
        (["text"], "line 1: not a line of a sampler's log"),
        (["other"], "line 1: not a line of a sampler's log"),
        (["five", "six"], "there are: (5, 0, True), (6, 0, True)"),
        (["nothing"], "No such file"),
    ):
        assert audit.main([str(tmp_path / name) for name in names]) == 2
        assert expected in capsys.readouterr().err


def test_a_line_that_was_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
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
