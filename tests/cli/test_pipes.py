"""The `pccl` command where nobody reads what it prints."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


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
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as stdout:
        ended = subprocess.run(
            [sys.executable, "-P", *([] if is_buffered else ["-u"]), "-m", "pccl", *arguments],
            stdout=stdout,
            stderr=subprocess.PIPE,
            env=environment,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (141, b"")
