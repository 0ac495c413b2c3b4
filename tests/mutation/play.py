"""A process that plays schedules with one mutant after the other: `python -m tests.mutation.play`.

To import all that a schedule needs takes longer than to play twenty. So this process imports it once, and forks a child
for each request, which comes as a line of JSON on standard input. The child has the mutant in it: the functions of the
mutated module get the code that its text compiles to. The answer is a line of JSON, too.

    {"path": ..., "text": ..., "seeds": [...]}      play these schedules with this text of a module
        {"played": 40}                              all are well
        {"seed": 7, "what": ..., "is_hang": false}  this one failed, and how
        {"unfit": ...}                              the mutant is in no function
    {"texts": {...}, "seeds": [...]}                in which schedules do mutants make a difference, see `reach`
        {"reached": {...}}

A schedule that takes much processor time hangs; the machine may be busy, so real time says nothing.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from tests.mutation.reach import reached
from tests.mutation.transplant import UnfitError, transplant
from tests.simulation.plan import Plan
from tests.simulation.schedule import play

SCHEDULE_CPU_S = 40.0
MEMORY_BYTES = 6 * 2**30


class HangError(BaseException):
    """A schedule takes too much processor time. Nothing that is tested may take this for an error of its own."""


def main() -> None:
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _tell(**_answer(json.loads(line)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            _tell(died=status)


def _answer(request: dict[str, Any]) -> dict[str, object]:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, _hang)
    try:
        if "texts" in request:
            return {"reached": reached(request["texts"], request["seeds"])}
        transplant(request["path"], request["text"])
        return _play_all(request["seeds"])
    except UnfitError as error:
        return {"unfit": str(error)}
    except Exception:
        return {"died": traceback.format_exc()}


def _play_all(seeds: Sequence[int]) -> dict[str, object]:
    for seed in seeds:
        signal.setitimer(signal.ITIMER_PROF, SCHEDULE_CPU_S)
        try:
            play(Plan.of_seed(seed))
        except HangError:
            return {"seed": seed, "is_hang": True, "what": f"more than {SCHEDULE_CPU_S:g} s of processor time"}
        except Exception as error:
            lines = str(error).splitlines() or [""]
            return {"seed": seed, "is_hang": False, "what": f"{type(error).__name__}: {lines[0][:160]}"}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return {"played": len(seeds)}


def _hang(number: int, frame: FrameType | None) -> None:
    raise HangError


def _tell(**found: object) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
