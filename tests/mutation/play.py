"""Plays schedules until one fails, in a process of its own: `python -m tests.mutation.play SEED COUNT [HINT]`.

Prints one line of JSON: the seed of the schedule that failed and how, or how many were played. A schedule that takes
much processor time hangs; the machine may be busy, so real time says nothing.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from tests.simulation.schedule import Plan, play

SCHEDULE_CPU_S = 40.0
MEMORY_BYTES = 6 * 2**30


class HangError(BaseException):
    """A schedule takes too much processor time. Nothing that is tested may take this for an error of its own."""


def main(first: int, count: int, hint: int | None) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, _hang)
    played = 0
    for seed in _seeds(first, count, hint):
        played += 1
        signal.setitimer(signal.ITIMER_PROF, SCHEDULE_CPU_S)
        try:
            play(Plan.of_seed(seed))
        except HangError:
            _tell(seed=seed, is_hang=True, what=f"more than {SCHEDULE_CPU_S:g} s of processor time")
            return
        except Exception as error:
            lines = str(error).splitlines() or [""]
            _tell(seed=seed, is_hang=False, what=f"{type(error).__name__}: {lines[0][:160]}")
            return
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    _tell(played=played)


def _seeds(first: int, count: int, hint: int | None) -> Iterator[int]:
    if hint is not None:
        yield hint
    yield from (seed for seed in range(first, first + count) if seed != hint)


def _hang(number: int, frame: FrameType | None) -> None:
    raise HangError


def _tell(**found: object) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)
