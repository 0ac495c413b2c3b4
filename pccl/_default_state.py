"""The state directory of `pccl master` at a fixed port, where nobody has asked for one or for none.

It lies in the user's home, one for each port. A master that cannot use it does without (`opened`): what nobody has
asked for must not keep a run from starting, nor stop it later.
"""

from __future__ import annotations

import logging
import os

from pccl._signal_handlers import pass_on
from pccl.runtime.master.fence_file import FenceFile, StateError
from pccl.runtime.network import addresses

logger = logging.getLogger("pccl.master")


class DefaultState(str):
    """The path of a default state directory."""

    is_lasting = False
    """Whether its user has said that what lies there lasts."""


def default_state(listen_address: str) -> str:
    """Return the state directory of a master at this address; empty: it has none by default."""
    try:
        _, port = addresses.parse(listen_address)
    except ValueError as error:
        pass_on(error)
        return ""
    if not port:
        return ""
    given = os.environ.get("XDG_STATE_HOME", "")
    home = given if os.path.isabs(given) else os.path.expanduser("~/.local/state")
    state = DefaultState(os.path.join(home, "pccl", f"master-{port}"))
    state.is_lasting = home is given
    return state


def opened(directory: str, owner: str) -> FenceFile | None:
    """Return the state directory of the master at `owner`, or None if it is a default one that cannot be used.
    StateError."""
    if not isinstance(directory, DefaultState):
        return FenceFile(directory, owner)
    try:
        return FenceFile(directory, owner, is_optional=True, is_lasting=directory.is_lasting)
    except StateError as error:
        pass_on(error)
        text = "this master keeps no record of its run: %s (--state DIR takes another directory, --state none none)"
        logger.warning(text, error)
        return None
