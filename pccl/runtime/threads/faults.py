"""Faults of pccl's own: exceptions that nobody expects. Each ends what it is in, a session or a master, and no more."""

from __future__ import annotations

import os
import traceback

TEXT_CHARACTERS_MAX = 200


def described(error: BaseException) -> str:
    """Return what was raised and where, in a line; for a group, the first of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].name} ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = f": {error}" if str(error) else ""
    return f"{type(error).__name__}{where}{text}"[:TEXT_CHARACTERS_MAX].replace("\n", " ")


def report(what: str, error: BaseException) -> str:
    """Return the text that tells the user that a bug of pccl has ended `what`."""
    return f"a bug of pccl has ended {what}: {described(error)}; please report it, with the log, which has more"
