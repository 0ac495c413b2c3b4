"""The one name of a process: its number in the run, and what it calls itself.

A peer calls itself HOST:PID unless its user has named it, and the master gives it a number. Wherever pccl speaks of a
peer, be it in a log, an error, the status or a trace, it says `2 (vm:8141)`, with `peer` before it in a sentence.
A process that `pccl launch` has started calls itself `vm:8141 [0]`, by what its lines of output begin with, so that
what one tells of another leads to them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

NAMED_MAX = 8
"""Number of peers that a sentence names at most."""

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
