"""Names of processes: a peer's number in the run and the name that the peer gives itself.

The default name is HOST:PID. `pccl launch` appends the rank with which it prefixes output (`vm:8141 [0]`). Logs,
errors, status and traces show a peer as `2 (vm:8141)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

NAMED_MAX = 8

NAME_CHARACTERS_MAX = 255

NameOf = Callable[[int], str]
"""Returns a peer's own name, or "" if it is unknown."""


def is_name(text: str) -> bool:
    """Return whether a name is safe to log and to send to all peers: short enough and printable."""
    return len(text) <= NAME_CHARACTERS_MAX and text.isprintable()


def run_mismatch(masters: str, peers: str) -> str:
    """Return why a peer with this run name cannot join a master with the other, or "". An empty name matches any."""
    if not masters or not peers or masters == peers:
        return ""
    return (
        f"this master serves run {masters!r}, but this peer belongs to run {peers!r} (PCCL_RUN): use another master, "
        f"or give both the same name"
    )


def label(peer: int, name: str) -> str:
    """Return a peer's name for tables and prefixes: `2 (vm:8141)`."""
    return f"{peer} ({name})" if name else str(peer)


def peer_named(peer: int, name: str) -> str:
    """Return a peer's name for use in a sentence: `peer 2 (vm:8141)`."""
    return f"peer {label(peer, name)}"


def peers_named(peers: Iterable[int], name_of: NameOf) -> str:
    """Return the names of the first NAMED_MAX peers, and the number of the others, for use in a sentence."""
    known = list(peers)
    shown = ", ".join(label(peer, name_of(peer)) for peer in known[:NAMED_MAX])
    more = f" and {len(known) - NAMED_MAX} more" if len(known) > NAMED_MAX else ""
    return f"{'peer' if len(known) == 1 else 'peers'} {shown}{more}"
