"""The name of a process: its number in the run, and its own name.

The default name is HOST:PID, under `pccl launch` with the rank that prefixes its output (`vm:8141 [0]`). Logs, errors,
status and traces show a peer as `2 (vm:8141)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

NAMED_MAX = 8

NAME_CHARACTERS_MAX = 255

NameOf = Callable[[int], str]
"""A function that returns what a peer calls itself; empty if that is not known."""


def is_name(text: str) -> bool:
    """Return whether a text does no harm in a log and in a message to all peers."""
    return len(text) <= NAME_CHARACTERS_MAX and text.isprintable()


def label(peer: int, name: str) -> str:
    """Return the name of a peer for tables and prefixes: `2 (vm:8141)`."""
    return f"{peer} ({name})" if name else str(peer)


def peer_named(peer: int, name: str) -> str:
    """Return the name of a peer for a sentence: `peer 2 (vm:8141)`."""
    return f"peer {label(peer, name)}"


def peers_named(peers: Iterable[int], name_of: NameOf) -> str:
    """Return the names of peers for a sentence, the first NAMED_MAX of them."""
    known = list(peers)
    shown = ", ".join(label(peer, name_of(peer)) for peer in known[:NAMED_MAX])
    more = f" and {len(known) - NAMED_MAX} more" if len(known) > NAMED_MAX else ""
    return f"{'peer' if len(known) == 1 else 'peers'} {shown}{more}"
