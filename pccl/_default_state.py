"""The state directory of `pccl master` at a fixed port, where nobody has asked for one or for none.

It lies in the user's home, one for each host and port. A master that cannot use it does without (`opened`): what nobody
has asked for must not keep a run from starting, nor stop it later.
"""

from __future__ import annotations

import logging
import os
import socket

from pccl.runtime.master.fence_file import FenceFile, StateError
from pccl.runtime.network import addresses

logger = logging.getLogger("pccl.master")


class DefaultState(str):
    """The path of a default state directory."""

    __slots__ = ()


def default_state(listen_address: str) -> str:
    """Return the state directory of a master at this address; empty: it has none by default."""
    try:
        _, port = addresses.parse(listen_address)
    except ValueError:
        return ""
    if not port:
        return ""
    home = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(home):
        home = os.path.expanduser("~/.local/state")
    if not os.path.isabs(home):
        return ""
    return DefaultState(os.path.join(home, "pccl", f"master-{socket.gethostname()}-{port}"))  # homes may be shared


def opened(directory: str, owner: str) -> FenceFile | None:
    """Return the state directory of the master at `owner`, or None if it is a default one that cannot be used.
    StateError."""
    if not isinstance(directory, DefaultState):
        return FenceFile(directory, owner)
    try:
        return FenceFile(directory, owner, is_optional=True)
    except StateError as error:
        text = "this master keeps no record of its run: %s (--state DIR takes another directory, --state none none)"
        logger.warning(text, error)
        return None
