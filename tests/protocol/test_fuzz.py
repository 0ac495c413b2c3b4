"""A bounded share of `python -m tests.protocol.fuzz`, whose docstring says what holds."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from pccl.protocol.codec import LENGTH_BYTES
from tests.protocol import fuzz

ROOT = Path(__file__).resolve().parents[2]


def fuzz_messages(count: int) -> None:
    """In a process of its own, whose peak of memory is measured."""
    seed = secrets.randbits(32)
    arguments = f"--messages {count} --frames 0 --seed {seed}".split()
    command = [sys.executable, "-m", "tests.protocol.fuzz", *arguments]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert ended.returncode == 0, f"{ended.stdout}{ended.stderr}"


def test_mutated_messages() -> None:
    fuzz_messages(10_000)


@pytest.mark.slow
def test_many_mutated_messages() -> None:
    fuzz_messages(40_000)


def test_kept_state_is_detected(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    left = []

    class Leaking(fuzz.AgainstCodec):
        def round(self) -> None:
            super().round()
            if self._mutator.count % 2 == 0:
                left.append(object())

    monkeypatch.setattr(fuzz, "TARGETS", ((1, Leaking),))
    with pytest.raises(AssertionError, match="blocks of memory more in use"):
        fuzz.fuzz_messages(13_000, seed=1)
    assert "seed 1\n" in capsys.readouterr().err


def test_message_memory_peak() -> None:
    mutator = fuzz.Mutator(seed=11)
    messages = fuzz.FROM_PEER + fuzz.FROM_MASTER
    longest = max(len(mutator.frame(mutator.random.choice(messages))) for _ in range(70_000))
    assert fuzz.MUTATED_BYTES_MAX / 2 < longest <= LENGTH_BYTES + fuzz.MUTATED_BYTES_MAX
