"""The `pccl` command with a standard output that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import IO

import pytest

from pccl import MasterNode


@pytest.mark.parametrize("arguments", [["completion", "bash"], ["--version"]], ids=" ".join)
def test_closed_pipe_ends_command_silently(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        assert printed_to(stdout, arguments) == (141, "")


@pytest.mark.parametrize(
    "arguments",
    [["status", "ADDRESS", "--watch"], ["completion", "bash"]],
    ids=" ".join,
)
def test_full_disk_and_closed_output_are_errors(master: MasterNode, arguments: list[str]) -> None:
    command = [master.address if part == "ADDRESS" else part for part in arguments]
    with open("/dev/full", "wb") as full:
        result = printed_to(full, command)
    assert result == (1, "pccl: standard output cannot be written: No space left on device\n")
    result = printed_to(None, command)
    assert result == (1, "pccl: standard output cannot be written: it is closed\n")


def printed_to(stdout: IO[bytes] | None, arguments: list[str]) -> tuple[int, str]:
    """Run the command with this standard output, None: with a closed one. Return its exit code and what it says."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-P", "-m", "pccl", *arguments]
    if stdout is None:
        command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    ended = subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, env=environment, check=False, text=True, timeout=60
    )
    return ended.returncode, ended.stderr
