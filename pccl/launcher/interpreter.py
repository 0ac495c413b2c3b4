"""How a child process is started that imports the pccl that runs here, and no other, and with what environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def module_command(module: str, *arguments: str) -> list[str]:
    """`python -m module arguments`.

    `-m` puts the working directory before what is installed: in a checkout that is a source tree, perhaps without its
    extension. -P prevents that, unless the working directory is where this process itself has pccl from.
    """
    imported_from = Path(__file__).resolve().parents[2]
    safe_path = [] if imported_from == Path(os.getcwd()).resolve() else ["-P"]
    return [sys.executable, *safe_path, "-m", module, *arguments]


def local_environment() -> dict[str, str]:
    """For peers of a master that was started along with them: the token is theirs too, but that master has no
    certificate, so TLS to another one is not asked of it, and several cannot have one port."""
    return {**os.environ, "PCCL_TLS_CA": "", "PCCL_LISTEN": "", "PCCL_ADVERTISE": ""}
