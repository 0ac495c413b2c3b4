"""A process that plays schedules with one mutant after the other: `python -m tests.mutation.play`.

To import all that a schedule needs takes longer than to play twenty. So this process imports it once, and forks a child
for each request, which comes as a line of JSON on standard input. The child has the mutant in it: the functions of the
mutated module get the code that its text compiles to. The answer is a line of JSON, too.

    {"path": ..., "text": ..., "schedules": [...]}      play these schedules with this text of a module
        {"played": 40}                                  all are well
        {"failed": 2, "what": ..., "is_hang": false}    the third failed, and how
        {"unfit": ...}                                  the mutant is in no function
    {"texts": {...}, "seeds": [...]}                    in which do mutants make a difference, see `reach`
        {"reached": {...}}

A schedule is `[seed]`, or `[seed, n]`: the n-th child of that one, see `child`.

A schedule that takes much processor time hangs; the machine may be busy, so real time says nothing.
"""

from __future__ import annotations

import json
import os
import random
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
from tests.simulation.plan_mutations import mutate
from tests.simulation.schedule import play

SCHEDULE_CPU_S = 40.0
OTHERS = 5000
"""The seeds of plans of which children may have parts."""
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
        return _play_all(request["schedules"])
    except UnfitError as error:
        return {"unfit": str(error)}
    except Exception:
        return {"died": traceback.format_exc()}


def child(seed: int, number: int) -> Plan:
    """Return a plan that is made of a seed's, and of a part of another one's at times."""
    rng = random.Random(f"{seed} {number}")
    return mutate(Plan.of_seed(seed), Plan.of_seed(rng.randint(1, OTHERS)), rng)


def _play_all(schedules: Sequence[Sequence[int]]) -> dict[str, object]:
    for at, (seed, *numbers) in enumerate(schedules):
        signal.setitimer(signal.ITIMER_PROF, SCHEDULE_CPU_S)
        try:
            play(child(seed, *numbers) if numbers else Plan.of_seed(seed))
        except HangError:
            return {"failed": at, "is_hang": True, "what": f"more than {SCHEDULE_CPU_S:g} s of processor time"}
        except Exception as error:
            lines = str(error).splitlines() or [""]
            return {"failed": at, "is_hang": False, "what": f"{type(error).__name__}: {lines[0][:160]}"}
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return {"played": len(schedules)}


def _hang(number: int, frame: FrameType | None) -> None:
    raise HangError


def _tell(**found: object) -> None:
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
