"""A plugin of pytest that writes which test failed first, or hangs, to the file that MUTATION_OUTCOME names.

A test that hangs ends the process: what it waits for in C cannot be interrupted.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator

import pytest

TEST_S = 150.0
"""Seconds after which a test of the default run hangs."""


def _tell(**found: object) -> None:
    path = os.environ["MUTATION_OUTCOME"]
    if not os.path.exists(path):
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            json.dump(found, file)
        os.replace(f"{path}.new", path)


def _end(test: str) -> None:
    _tell(test=test, is_hang=True, what=f"more than {TEST_S:g} s")
    os._exit(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    timer = threading.Timer(TEST_S, _end, [item.nodeid])
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else str(report.longrepr)
        _tell(test=report.nodeid, is_hang=False, what=(text.splitlines() or [""])[0][:160])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        lines = str(report.longrepr).strip().splitlines() or [""]
        _tell(test=report.nodeid or "collection", is_hang=False, what=lines[-1][:160])
