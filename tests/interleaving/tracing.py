"""Hand-overs inside Python code: between lines, or wherever the interpreter may switch threads or call signal handlers.

    HANDOVERS   none also what the stand-ins do: locks, wake-ups, calls into the native library
    LINES       before every line of the modules that are watched
    BYTECODES   wherever CPython looks whether another thread or a signal is waiting: where a function begins, after
                a call, and where a loop goes back

BYTECODES is what this interpreter can do, and is also where Ctrl-C may be raised. LINES is coarser within a line, but
goes beyond what the interpreter does today, which a free-threaded one may do.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable
from enum import Enum
from types import CodeType, FrameType
from typing import Any


class Grain(Enum):
    """The points where a thread may be preempted."""

    HANDOVERS = "handovers"
    LINES = "lines"
    BYTECODES = "bytecodes"


WATCHED = (
    "pccl/communicator.py",
    "pccl/_session_holder.py",
    "pccl/handle.py",
    "pccl/protocol/peer/ops.py",
    "pccl/runtime/data_plane/engine.py",
    "pccl/runtime/data_plane/fast_path.py",
    "pccl/runtime/data_plane/pending.py",
    "pccl/runtime/session/driver.py",
    "pccl/runtime/session/ops.py",
    "pccl/runtime/session/recorder.py",
    "pccl/runtime/session/ops.py",
    "pccl/runtime/session/driver.py",
    "pccl/runtime/session/ops.py",
    "pccl/runtime/session/session.py",
    "pccl/runtime/threads/",
)
"""The modules whose lines and bytecodes are hand-overs: those that several threads run, or that meet signals."""

Tracer = Callable[[FrameType, str, Any], Any]

_watched: dict[CodeType, bool] = {}
_looks: dict[CodeType, frozenset[int]] = {}


def is_watched(code: CodeType) -> bool:
    """Return whether hand-overs within this code are of interest."""
    found = _watched.get(code)
    if found is None:
        path = code.co_filename
        found = any(f"/{part}" in path for part in WATCHED) and "/tests/" not in path
        _watched[code] = found
    return found


def _looks_after(code: CodeType) -> frozenset[int]:
    """Return the offsets where the interpreter has just looked for other threads and signals."""
    found = _looks.get(code)
    if found is None:
        offsets = set()
        was_call = False
        for instruction in dis.get_instructions(code):
            if was_call:
                offsets.add(instruction.offset)
            was_call = instruction.opname.startswith("CALL")
            if instruction.opname.startswith("JUMP_BACKWARD") and "NO_INTERRUPT" not in instruction.opname:
                offsets.add(instruction.argval)
        found = _looks[code] = frozenset(offsets)
    return found


def tracer(grain: Grain, step: Callable[[str], None]) -> Tracer | None:
    """Return a function for `sys.settrace` that calls `step` at each hand-over."""
    if grain is Grain.HANDOVERS:
        return None

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            step(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        return on_line

    def on_opcode(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _looks_after(frame.f_code):
            step(f"{frame.f_code.co_qualname}:{frame.f_lineno}+{frame.f_lasti}")
        return on_opcode

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        if not is_watched(frame.f_code):
            return None
        if grain is Grain.LINES:
            return on_line
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if not frame.f_code.co_flags & inspect.CO_GENERATOR:  # which may be about to be closed: no raise there
            step(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        return on_opcode

    return on_call


def trace_this_thread(grain: Grain, step: Callable[[str], None]) -> None:
    """Have `step` called at the hand-overs of the calling thread."""
    sys.settrace(tracer(grain, step))  # type: ignore[arg-type]
