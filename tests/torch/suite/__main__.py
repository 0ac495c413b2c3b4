"""Run torch's `distributed_test` on a backend and print a table of what passed, was skipped, and failed.

    python -m tests.torch.suite                          # all tests on pccl
    python -m tests.torch.suite --backend gloo           # the baseline
    python -m tests.torch.suite --jobs 2 --part 1/4      # a quarter of them
    python -m tests.torch.suite all_reduce barrier       # tests with one of these words in their names
    python -m tests.torch.suite --start spawn all_gather # ranks that import torch themselves

It ends with 1 if a test failed, was skipped without a listed reason, or ran although one is listed.
"""

import argparse
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.torch.suite.report import Outcome, verdict
from tests.torch.suite.skips import SKIPS

GRACE_S = 45  # beyond a test's own bound, after which its worker is ended
START_S = 180  # a worker imports torch, on a busy machine
MORE_RANKS = ("small world size", "requires world size", "exact world size")


@dataclass(frozen=True)
class Settings:
    backend: str
    start: str
    timeout_s: float
    logs: Path


class Worker:
    """A process of `tests.torch.suite.worker`, and the ranks it has started: a session of their own, ended together."""

    def __init__(self, settings: Settings, world_size: int, number: int, *flags: str) -> None:
        self.settings = settings
        self.log = settings.logs / f"{settings.backend}-{world_size}-{number}.log"
        environment = os.environ | {
            "BACKEND": settings.backend,
            "WORLD_SIZE": str(world_size),
            "SUITE_START": settings.start,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(settings.timeout_s)),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.torch.suite.worker", str(self.log), *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self.tests_run = 0

    def answer(self, timeout_s: float) -> dict[str, object] | None:
        """The next line that the worker writes; None if it ended or takes longer."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], timeout_s)
        line = self.process.stdout.readline() if ready else ""
        return json.loads(line) if line else None

    def run(self, test: str, world_size: int) -> Outcome:
        """Run a test; a worker that does not answer in time, or has died, is ended, and the test has failed."""
        assert self.process.stdin is not None
        bound_s = self.settings.timeout_s + GRACE_S + (0 if self.tests_run else START_S)
        self.tests_run += 1
        began = time.monotonic()
        try:
            print(test, file=self.process.stdin, flush=True)
            answer = self.answer(bound_s)
        except BrokenPipeError:
            answer = None
        if answer is not None:
            return Outcome(test, str(answer["outcome"]), str(answer["reason"]), float(answer["seconds"]), world_size)  # type: ignore[arg-type]
        seconds = time.monotonic() - began
        late = seconds >= bound_s
        self.end()
        why = f"no result within {bound_s:.0f} s" if late else f"its process ended with {self.process.returncode}"
        return Outcome(test, "failed", f"{why}; see {self.log}", seconds, world_size)

    def end(self) -> None:
        """End the worker and whatever ranks it has."""
        with suppress(ProcessLookupError):  # its session has ended
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None


def run_all(settings: Settings, world_size: int, tests: list[str], jobs: int) -> list[Outcome]:
    """Run the tests in `jobs` workers; how each of them went, in the order of `tests`."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for test in tests:
        waiting.put(test)
    outcomes: dict[str, Outcome] = {}

    def work(number: int) -> None:
        worker: Worker | None = None
        while True:
            try:
                test = waiting.get_nowait()
            except queue.Empty:
                break
            if worker is None or worker.ended:
                worker = Worker(settings, world_size, number)
            outcome = outcomes[test] = worker.run(test, world_size)
            print(f"{outcome.outcome:8} {outcome.seconds:6.1f} s  {test}", file=sys.stderr, flush=True)
        if worker is not None:
            worker.end()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(min(jobs, len(tests)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [outcomes[test] for test in tests]


def names(settings: Settings, world_size: int) -> tuple[str, list[str]]:
    """torch's version, and the names of its tests."""
    lister = Worker(settings, world_size, 0, "--list")
    try:
        answer = lister.answer(START_S)
    finally:
        lister.end()
    if answer is None:
        sys.exit(f"torch's tests could not be listed; see {lister.log}")
    tests = answer["tests"]
    assert isinstance(tests, list)
    return str(answer["torch"]), tests


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="run only tests that have one of these in their names")
    parser.add_argument("--backend", default="pccl")
    parser.add_argument(
        "--world-size", type=int, nargs="+", default=[4, 8], help="the later ones for tests that want more"
    )
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time")
    parser.add_argument("--part", default="1/1", help="2/4: the second quarter of the tests")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork", help="how ranks are started")
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a test may take")
    parser.add_argument("--logs", type=Path, default=None, help="folder of the workers' logs")
    parser.add_argument("--json", type=Path, default=None, help="write each test's outcome here")
    arguments = parser.parse_args()
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="torch-suite-"))
    logs.mkdir(parents=True, exist_ok=True)
    settings = Settings(arguments.backend, arguments.start, arguments.timeout, logs)
    began = time.monotonic()
    torch_version, tests = names(settings, arguments.world_size[0])
    part, parts = map(int, arguments.part.split("/"))
    tests = [test for test in tests if not arguments.words or any(word in test for word in arguments.words)][
        part - 1 :: parts
    ]
    outcomes: dict[str, Outcome] = {}
    for world_size in arguments.world_size:
        left = [test for test in tests if test not in outcomes or wants_more_ranks(outcomes[test])]
        for outcome in run_all(settings, world_size, left, arguments.jobs):
            if outcome.test not in outcomes or outcome.outcome != "skipped":
                outcomes[outcome.test] = outcome
    done = [outcomes[test] for test in tests]
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([vars(outcome) for outcome in done], indent=1))
    listed = SKIPS if settings.backend == "pccl" else None
    text, fine = verdict(done, listed)
    seconds = time.monotonic() - began
    print(f"torch {torch_version}, distributed_test on {settings.backend}, {seconds:.0f} s, logs in {logs}\n{text}")
    return 0 if fine else 1


def wants_more_ranks(outcome: Outcome) -> bool:
    """Whether a test was skipped for want of ranks."""
    return outcome.outcome == "skipped" and any(words in outcome.reason for words in MORE_RANKS)


if __name__ == "__main__":
    sys.exit(main())
