"""Known faults of threads: mends that ships has, taken out again, and plausible slips of one line.

Each is an edit of a function's source, put in for a schedule's time. A campaign has to find it: that is what shows that
the schedules, and the checks of the scenarios, are worth something. The text to be replaced is looked for, so that an
edit that no longer applies is noticed.
"""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from pccl import _session_holder as session_holder
from pccl import communicator
from pccl.runtime.data_plane import fast_path, pending
from pccl.runtime.session import ops, recorder
from pccl.runtime.threads import portal, waking
from tests.interleaving.tracing import Grain


@dataclass(frozen=True)
class Edit:
    """A change of one function."""

    owner: Any
    """The class or module that has it."""
    name: str
    changes: tuple[tuple[str, str], ...]
    """Lines to be replaced, each with those that take their place."""

    def edited(self) -> Callable[..., Any]:
        """Return the function with the change. AssertionError if the text to be replaced is not there."""
        function = getattr(self.owner, self.name)
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in self.changes:
            source = _replaced(source, old, new)
        module = sys.modules[function.__module__]
        found: dict[str, Any] = {}
        header = "from __future__ import annotations\n"
        code = compile(header + source, inspect.getsourcefile(function) or "", "exec")
        exec(code, module.__dict__, found)
        made: Callable[..., Any] = found[self.name]
        return made


def _replaced(source: str, old: str, new: str) -> str:
    """Return the source with some lines replaced by others, which are as deep as these."""
    first = old.splitlines()[0]
    indents = {line[: len(line) - len(first)] for line in source.splitlines() if line.lstrip() == first}
    places = [indent for indent in indents for _ in range(source.count(textwrap.indent(old, indent)))]
    assert len(places) == 1, f"the text is not there once:\n{old}\nin\n{source}"
    return source.replace(textwrap.indent(old, places[0]), textwrap.indent(new, places[0]))


@dataclass(frozen=True)
class Known:
    """A fault, and the scenario that is to find it, with threads preempted as `grain` says."""

    what: str
    scenario: str
    edit: Edit
    grain: Grain = Grain.HANDOVERS

    @contextmanager
    def put_in(self) -> Iterator[None]:
        edit = self.edit
        with ExitStack() as undo:
            undo.enter_context(mock.patch.object(edit.owner, edit.name, edit.edited()))
            if edit.name == "wait_any":
                undo.enter_context(mock.patch.object(pending, "wait_any", waking.wait_any))
            yield


def _fault(
    what: str, scenario: str, owner: Any, name: str, *changes: tuple[str, str], grain: Grain = Grain.HANDOVERS
) -> Known:
    dedented = tuple((_lines(old), _lines(new)) for old, new in changes)
    return Known(what, scenario, Edit(owner, name, dedented), grain)


def _lines(text: str) -> str:
    return textwrap.dedent(text).strip("\n")


FAULTS: dict[str, Known] = {
    "mixed-ops": _fault(
        "launches are counted after the engine was heard, so that one finds its predecessor uncounted",
        "turns",
        ops.Ops,
        "_take",
        ("for _ in range(launches):", "while self._launched:"),
        grain=Grain.LINES,
    ),
    "cancel-order": _fault(
        "cancels are counted after the launches, so that one is taken before what it cancels",
        "impatient",
        ops.Ops,
        "_take",
        ("for _ in range(cancels):", "while self._cancelled:"),
    ),
    "reclaim-order": _fault(
        "arrays that are taken back are counted after the launches, so that an op is missed that has just come",
        "interrupts",
        ops.Ops,
        "_take",
        ("for _ in range(releases):", "while self._releases:"),
    ),
    "tag-freed-late": _fault(
        "an op's tag is freed after its caller was woken",
        "turns",
        pending.PendingOp,
        "finish",
        (
            """
            if self.result is None:
                self._session.free_tag(self)  # first, because a waiting thread may launch the next op
            """,
            "pass",
        ),
        (
            "if self._callbacks:",
            """
            self._session.free_tag(self)
            if self._callbacks:
            """,
        ),
    ),
    "tag-kept": _fault(
        "an op that was over before its interrupted caller could free its tag keeps it",
        "interrupts",
        communicator,
        "interrupted",
        ("op.finish(op.result)  # the interrupt may have cut this short", "pass"),
    ),
    "claim-in-two-steps": _fault(
        "two callers can both claim a tag",
        "crowd",
        ops.Ops,
        "_claim_tag",
        (
            "holder = self.holders.setdefault(op.name, op)",
            """
            found = self.holders.get(op.name)
            if found is None:
                self.holders[op.name] = found = op
            holder = found
            """,
        ),
        grain=Grain.BYTECODES,
    ),
    "latch-looks-once": _fault(
        "a latch is looked at before the waiter is on its list, and not after",
        "turns",
        waking,
        "wait_any",
        (
            "lock = threading.Lock()",
            """
            if any(latch._is_set for latch in latches):
                return True
            lock = threading.Lock()
            """,
        ),
        ("while not any(map(_IS_SET, latches)):", "while True:"),
    ),
    "latch-set-late": _fault(
        "a latch wakes its waiters before it is set",
        "turns",
        waking.Latch,
        "set",
        ("self._is_set = True", "pass"),
        (
            "self._waiters.pop().release()",
            """
            self._waiters.pop().release()
            self._is_set = True
            """,
        ),
    ),
    "exit-forgets-launch": _fault(
        "an op that is launched as the portal ends is never over",
        "exiting",
        ops.Ops,
        "_enqueue",
        (
            """
            with suppress(ValueError):
                self._launched.remove(op)
            self._require_alive_for(op)
            raise
            """,
            "pass",
        ),
        grain=Grain.LINES,
    ),
    "exit-forgets-call": _fault(
        "a call of the portal that comes as it ends is never over",
        "exiting",
        portal.Portal,
        "_start",
        (
            """
            except trio.RunFinishedError:
                job.end()
            """,
            """
            except trio.RunFinishedError:
                pass
            """,
        ),
    ),
    "unsubmitted-kept": _fault(
        "an op whose caller was interrupted before it was submitted never gives its arrays back",
        "interrupts",
        ops.Ops,
        "_take_release",
        ("self.finish(op, ps.OpResult(op.op, Result.TIMEOUT, text, 0))", "pass"),
    ),
    "uses-kept": _fault(
        "the fast path goes on counting a tag that the machine counts",
        "turns",
        ops.Ops,
        "_take_launch",
        ("self._fast_path.forget_uses(op.name)", "pass"),
    ),
    "count-forgotten": _fault(
        "the fast path asks the machine again for the count of a tag that it counts itself",
        "turns",
        fast_path.FastPath,
        "run",
        ("tag = opening.tags.get(op.name)", "tag = opening.tags.pop(op.name, None)"),
    ),
    "over-before-released": _fault(
        "an op is over for its caller before its arrays are its own",
        "impatient",
        pending.PendingOp,
        "finish",
        (
            "self.result = result",
            """
            self._over.set()
            self.result = result
            """,
        ),
        grain=Grain.BYTECODES,
    ),
    "two-portals": _fault(
        "two threads that are the first to need the portal make one each",
        "founding",
        portal,
        "current",
        ("with _lock:", "if True:"),
    ),
    "closed-while-connecting": _fault(
        "a communicator that is closed while it connects stays connected",
        "founding",
        session_holder.SessionHolder,
        "_join",
        ("if self._is_closed:", "if False:"),
    ),
    "given-up-read-live": _fault(
        "the trio thread looks through the ops that are given up while a caller gives one up",
        "impatient",
        ops.Ops,
        "_hand_over_given_up",
        (
            "given_up = [self._cancelled[at][0] for at in range(cancels)]",
            "given_up = [op for op, _, _ in self._cancelled]",
        ),
        grain=Grain.BYTECODES,
    ),
    "samples-read-live": _fault(
        "a recording is taken of the samples while the trio thread adds one",
        "watching",
        recorder.FlightRecorder,
        "recording",
        (
            "links=[_sample(*taken) for taken in list(self._samples)],",
            "links=[_sample(*taken) for taken in self._samples],",
        ),
        grain=Grain.BYTECODES,
    ),
}
