"""A bounded share of `python -m tests.protocol.fuzz`, whose docstring says what holds."""

from __future__ import annotations

import secrets

import pytest

from tests.protocol.fuzz import fuzz_messages


def test_mutated_messages_harm_nobody() -> None:
    fuzz_messages(10_000, secrets.randbits(32))


@pytest.mark.slow
def test_many_mutated_messages_harm_nobody() -> None:
    fuzz_messages(40_000, secrets.randbits(32))
