"""What the callers of a schedule do, and what each must find: only what callers see.

    turns       callers that wait, and others that do not, take turns on each tag
    impatient   the same, and some give up after a while
    crowd       callers that take no turns: whose tag is in flight tries again
    interrupts  Ctrl-C at any moment of a caller, in ops and group calls
    watching    others read counters and flight recorders while callers are in ops
    closing     a peer is closed while its callers are in ops
    exiting     the interpreter exits while callers are in ops
    forking     a child is forked while callers are in ops: no call waits there, none is lost here
    founding    the first calls of a process: peers are made, connected and closed by several threads

Each use of a tag adds up numbers that tell it from all other uses, so a result that went to another op is seen.
"""

from __future__ import annotations

from tests.interleaving.endings import Closing, Crowd, Exiting, Founding, Interrupts
from tests.interleaving.scenario import Scenario
from tests.interleaving.turns import Forking, Impatient, Turns, Watching

SCENARIOS: dict[str, type[Scenario]] = {
    "turns": Turns,
    "impatient": Impatient,
    "watching": Watching,
    "crowd": Crowd,
    "interrupts": Interrupts,
    "closing": Closing,
    "exiting": Exiting,
    "forking": Forking,
    "founding": Founding,
}
