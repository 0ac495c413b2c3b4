"""The `pccl` command where what it prints cannot be written, or nobody reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO

import pytest

from pccl import MasterNode


@pytest.mark.parametrize(
    ("arguments", "is_buffered"),
    [
        (["completion", "bash"], True),
        (["completion", "bash"], False),
        (["--version"], True),
        (["--version"], False),
        (["--help"], True),  # argparse itself swallows what a write without a buffer says
    ],
)
def test_whoever_reads_nothing_ends_it_without_a_word(arguments: list[str], is_buffered: bool) -> None:
    """What fits into a buffer is written when the command has done all else."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        assert printed_to(stdout, arguments, is_buffered) == (141, "")


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        ["status", "ADDRESS"],
        ["status", "ADDRESS", "--json"],
        ["status", "ADDRESS", "--watch"],
        ["status", "ADDRESS", "--watch", "--json"],
        ["doctor", "ADDRESS", "--json"],
        ["completion", "bash"],
        ["--version"],
    ],
    ids=" ".join,
)
def test_a_full_disk_and_a_closed_output_are_told_in_a_line(
    master: MasterNode, arguments: list[str], is_buffered: bool
) -> None:
    command = [master.address if part == "ADDRESS" else part for part in arguments]
    with open("/dev/full", "wb") as full:
        told = printed_to(full, command, is_buffered)
    assert told == (1, "pccl: standard output cannot be written: No space left on device\n")
    told = printed_to(None, command, is_buffered)
    assert told == (1, "pccl: standard output cannot be written: it is closed\n")


def printed_to(stdout: IO[bytes] | None, arguments: list[str], is_buffered: bool) -> tuple[int, str]:
    """Run the command with this standard output, None: with a closed one. Return its exit code and what it says."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-P", *([] if is_buffered else ["-u"]), "-m", "pccl", *arguments]
    if stdout is None:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    ended = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, env=environment, check=False, text=True, timeout=60
    )
    return ended.returncode, ended.stderr
