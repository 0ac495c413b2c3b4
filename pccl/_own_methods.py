"""Gives each communicator methods of its own, made of the ones that both share.

What both communicators have is written once (`pccl._communicator_methods`). Inherited as it is, a method would call
itself `CommunicatorMethods.all_reduce` in a TypeError, and `help` would say that it returns a `ReduceInfoT`. So each of
the two gets a copy that bears its name and says what it returns there; in `AsyncCommunicator` one that waits is a
coroutine function, as libraries that retry, wrap or mock calls ask by `inspect.iscoroutinefunction`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import FunctionType
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


class _Written(str):
    """An annotation as it stands in the source, which `inspect` shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def own_methods(results: Mapping[str, Any], *, are_coroutines: bool) -> Callable[[Class], Class]:
    """Return a class decorator that copies all public methods of the bases, and `__init__`, into the class.

    `results` tells by the names of type variables what methods that are annotated with them return when they have
    waited. With `are_coroutines` these become coroutine functions.
    """

    def decorate(kind: Class) -> Class:
        shared = {name: each for base in reversed(kind.__mro__) for name, each in vars(base).items()}
        for name, each in shared.items():
            is_public = name == "__init__" or not name.startswith("_")
            if is_public and isinstance(each, FunctionType) and name not in vars(kind):
                setattr(kind, name, _own(each, kind, results, are_coroutines))
        return kind

    return decorate


def _own(shared: FunctionType, kind: type, results: Mapping[str, Any], are_coroutines: bool) -> FunctionType:
    result = shared.__annotations__.get("return")
    own = FunctionType(shared.__code__, shared.__globals__, shared.__name__, shared.__defaults__, shared.__closure__)
    own.__kwdefaults__ = shared.__kwdefaults__
    own.__doc__ = shared.__doc__
    own.__qualname__ = f"{kind.__qualname__}.{shared.__name__}"
    own.__module__ = kind.__module__
    own.__annotations__ = {name: _Written(each) for name, each in shared.__annotations__.items()}
    if result is None or result not in results:
        return own
    own.__annotations__["return"] = results[result]
    return _as_coroutine_function(own) if are_coroutines else own


def _as_coroutine_function(method: Callable[..., Any]) -> Any:
    """Return a coroutine function that awaits what `method` returns. Wrong arguments are told where it is awaited."""

    @wraps(method)
    async def call(*args: Any, **kwargs: Any) -> Any:
        return await method(*args, **kwargs)

    return call
