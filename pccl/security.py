"""What the public classes take about strangers: arguments, and the environment where they are left out."""

from __future__ import annotations

import os

from pccl.errors import PCCLError
from pccl.types import Result

TOKEN_VARIABLE = "PCCL_TOKEN"


def token(argument: str | None, func_name: str) -> str:
    """The run's shared secret, "" if there is none. INVALID_ARGUMENT."""
    found = os.environ.get(TOKEN_VARIABLE, "") if argument is None else argument
    if not isinstance(found, str):
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, f"the token must be a str, not {type(found).__name__}")
    found = found.strip()  # a newline comes with many ways to read a file
    try:
        found.encode()
    except UnicodeEncodeError:
        raise PCCLError(Result.INVALID_ARGUMENT, func_name, "the token is not valid Unicode text") from None
    return found
