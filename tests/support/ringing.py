"""A signal handler that raises what it is given, wherever a function is called that rings."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.support.interrupts import SIGNAL

Ring = Callable[..., Any]


@contextmanager
def ringing(error: BaseException) -> Iterator[Ring]:
    """Yield a replacement of a function where a signal comes whose handler raises `error`.
    This must come out of what is called within, as it is."""

    def handle(*_: object) -> None:
        raise error

    def ring(*_: object, **__: object) -> None:
        signal.raise_signal(SIGNAL)
        for _ in range(3):  # it has been handled by then
            pass

    before = signal.signal(SIGNAL, handle)
    try:
        with pytest.raises(type(error)) as raised:
            yield ring
        assert raised.value is error
    finally:
        signal.signal(SIGNAL, before)
