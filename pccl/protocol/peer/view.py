"""The view: an installed membership, as one peer sees it.

A view is what view-synchronous group communication calls one: all peers of a group that install it have the same
members in the same order, and every op that was under way before ends the same way for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pccl.protocol.direct_limit import UNKNOWN


@dataclass(frozen=True)
class View:
    """An installed membership, as seen by one peer. Immutable: threads may keep it."""

    view: int
    epoch: int
    """The view in which the group's ring last changed."""
    peer: int
    group: int
    ring: tuple[int, ...]
    """The peers of this peer's group by rank."""
    group_sizes: dict[int, int]
    """The number of peers of each group."""
    is_meshed: bool = False
    """Whether every pair of the group has a link."""
    direct_limit: int = UNKNOWN
    """The size up to which ops go direct: see `protocol.direct_limit`."""
    is_local: bool = False
    """Whether all peers of the group are on one host."""

    @property
    def world_size(self) -> int:
        return len(self.ring)

    @property
    def global_world_size(self) -> int:
        return sum(self.group_sizes.values())


def alone_in(group: int) -> str:
    """Return the error text for a caller whose group has no other peer."""
    return f"alone in peer group {group}; wait_for_peers(2) returns when another one has joined"
