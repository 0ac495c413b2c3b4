"""How a child process is started that imports the pccl that runs here, and no other."""

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
