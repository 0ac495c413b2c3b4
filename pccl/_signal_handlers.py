"""Exceptions that a signal handler of the program raises, told from those of the call that the signal interrupted.

A handler may raise anything, such as a TimeoutError after an alarm, or the error of a call that it makes; and it does
so wherever the main thread happens to be. Who catches errors there by their type has to ask first: what a handler has
raised is the program's, and goes up to where the program expects it, as a KeyboardInterrupt does.
"""

from __future__ import annotations

import inspect
import signal
import threading
import traceback
from collections.abc import Callable, Set
from functools import partial
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

INSISTED_MAX = 10
"""Signals that may come one after the other while something is insisted upon."""


def has_raised(error: BaseException) -> bool:
    """Whether a signal handler has raised this exception, in this thread. To be asked where it was caught."""
    begun = error.__traceback__
    if begun is None or begun.tb_next is None:
        return False  # it comes from a built-in function that was called here
    return _is_from(current(), error)


def pass_on(error: BaseException) -> None:
    """Raise the error once more if a signal handler has raised it. To be called first by whoever has caught it."""
    if has_raised(error):
        try:
            raise error
        finally:
            del error  # whose traceback has this frame


def pass_on_unless_from_system(error: OSError) -> None:
    """Do as `pass_on`, also for what no system call has raised: where the code that was called makes no such errors, a
    signal handler has, even if it is not known as one."""
    pass_on(error)
    if error.errno is None:
        raise error


def insist(call: Callable[[], object]) -> None:
    """Make a call until it has come to its end, whatever signal handlers raise meanwhile. It may be made several times.

    For what has to be done because of an exception, which a signal handler may have raised, and is raised again then.
    That of a second signal, come at the same time, ends this before it has begun: so whoever insists does so again when
    that happens (`except BaseException`)."""
    for attempts_left in reversed(range(INSISTED_MAX)):
        try:
            call()
            break
        except BaseException:
            if not attempts_left:
                raise


def current() -> set[CodeType]:
    """Return the code of the program's signal handlers that may run in this thread."""
    if not _is_main_thread():
        return set()
    found = (_code_of(signal.getsignal(number)) for number in signal.valid_signals())
    return {code for code in found if code is not None}


def is_behind(handlers: Set[CodeType], error: BaseException, earlier: BaseException | None) -> bool:
    """Whether one of the handlers has raised an exception, or what it was raised for. `earlier` is what was being
    handled before, which is the context of all that is raised meanwhile."""
    seen = {id(None), id(earlier)}
    causes: list[BaseException | None] = [error]
    while causes:
        cause = causes.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        if _is_from(handlers, cause):
            return True
        causes += cause.__cause__, cause.__context__
    return False


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _is_from(handlers: Set[CodeType], error: BaseException) -> bool:
    if not _is_main_thread():
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return any(frame.f_code in handlers for frame in frames) or any(map(_is_given, frames, frames[1:]))


def _is_given(frame: FrameType, called: FrameType) -> bool:
    """Whether a function was called with its caller's frame, as handlers are. One may have taken itself away since."""
    code, found = called.f_code, called.f_locals
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    values = [found.get(name) for name in code.co_varnames[:count]]
    variadic = [one for each in values if type(each) is tuple for one in each]
    return any(each is frame for each in (*values, *variadic))  # by identity: arrays do not compare


def _code_of(handler: Any) -> CodeType | None:
    """Return the code that a signal handler runs. None: it is not the program's, or not written in Python. Of an object
    only the type is looked at: attributes of its own may be anything."""
    while type(handler) is partial:
        handler = handler.func
    if type(handler) is MethodType:
        handler = handler.__func__
    if type(handler) is not FunctionType:
        handler = getattr(type(handler), "__call__", None)  # noqa: B004
    return handler.__code__ if type(handler) is FunctionType else None
