"""The command line and the environment of child processes that import the very pccl that runs here."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command `python -m module arguments`.

    `-m` puts the working directory before what is installed: in a checkout that is a source tree, perhaps without its
    extension. -P prevents that, unless the working directory is where this process itself has pccl from.
    """
    imported_from = Path(__file__).resolve().parents[2]
    safe_path = [] if imported_from == Path(os.getcwd()).resolve() else ["-P"]
    return [sys.executable, *safe_path, "-m", module, *arguments]


def local_environment() -> dict[str, str]:
    """Return the environment for peers of a master that was started along with them.

    They share the token. That master has no certificate, so the peers use no TLS; nor do they take the addresses of
    PCCL_LISTEN and PCCL_ADVERTISE, since several peers cannot have one port.
    """
    return {**os.environ, "PCCL_TLS_CA": "", "PCCL_LISTEN": "", "PCCL_ADVERTISE": ""}
