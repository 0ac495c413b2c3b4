"""`pccl` commands as processes, which are forked and so need no imports of their own."""

from __future__ import annotations

import subprocess
from typing import Any

from tests.processes import fork_server
from tests.support.streams import TIMEOUT_S


def pccl(*arguments: str, **streams: Any) -> subprocess.Popen[str]:
    """Start the command with this process's environment. By default, its output goes to pipes."""
    return fork_server.start(
        "pccl.cli", *arguments, **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
    )


def ended(*arguments: str, **streams: Any) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    with pccl(*arguments, **streams) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)
