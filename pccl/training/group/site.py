"""A model that is sharded over the ranks of a site and trained together with other sites.

Within a site, on a fast network, torch.distributed shards one model over several processes, the *ranks* (as FSDP2
does). Ranks with the same number in all sites hold the same shard and form a peer group. Each has its own communicator:

                rank 0    rank 1    rank 2
    site A      shard 0   shard 1   shard 2       each row: torch.distributed, gradients at every step
    site B      shard 0   shard 1   shard 2       each column: pccl, a peer group, once in many steps

The master admits all ranks of a site in one view and drops them all if one is lost (`Communicator(site=, site_size=)`).
A loss does not reach all groups at once, so the averages of two shards may include different peers.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from typing import Any

from pccl import Attribute, Communicator, PCCLError, Result


class Site:
    """The position of this rank in a grid of sites and ranks.

    All ranks of a site make the same calls in the same order. Not thread-safe. Usually created by `of_process_group`.

    Args:
        name: The same on all ranks, and unique to this start of this site.
        rank: From 0 to `size` - 1.
        size: The number of ranks in the site.
        gather: A function; `gather(text)` returns the texts of all ranks, ordered by rank.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        gather: Callable[[str], list[str]],
    ) -> None:
        self.rank = rank
        self.size = size
        self.gather = gather
        self._name = name
        self._communicators = 0
        self._names = 0

    @classmethod
    def of_process_group(cls, group: Any = None) -> Site:
        """Create the site for a torch.distributed process group (None: the default one). All of its ranks call this."""
        torch = sys.modules["torch"]
        dist = torch.distributed
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        # A separate group, on the CPU, so that its collectives do not mix with the program's.
        own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        names = [uuid.uuid4().hex]
        dist.broadcast_object_list(names, src=ranks[0], group=own)

        def gather(text: str) -> list[str]:
            texts: list[Any] = [None] * len(ranks)
            dist.all_gather_object(texts, text, group=own)
            return texts

        return cls(names[0], dist.get_rank(own), len(ranks), gather)

    def agree(self, flag: bool) -> bool:
        """Return, on all ranks, whether all of them passed True."""
        return all(self.gather("1" if flag else ""))

    def unique_name(self) -> str:
        """Return a new name, the same on all ranks."""
        self._names += 1
        return f"{self._name}.{self._names}"

    def communicator(self, address: str, **options: Any) -> Communicator:
        """Return a communicator for this rank, in its shard's peer group. `options` are those of `Communicator`."""
        self._communicators += 1
        name = f"{self._name}.{self._communicators}"
        return Communicator(address, peer_group=self.rank, site=name, site_size=self.size, **options)

    def check(self, communicator: Communicator) -> None:
        """Raise PCCLError INVALID_USAGE, on all ranks, if the run is not a grid of sites of this size."""
        groups, largest, peers = _shape(communicator)
        # Decide together: once some ranks have detected the error and left, the rest may look like a site that fits.
        if not self.agree(groups == self.size and peers == groups * largest):
            raise PCCLError(
                Result.INVALID_USAGE,
                "join",
                f"this site has {self.size} ranks, but the run has {peers} peers in {groups} peer groups, of at most "
                f"{largest}: all sites must have the same number of ranks, each in the peer group of its number",
            )


def _shape(communicator: Communicator) -> tuple[int, int, int]:
    attributes = (
        Attribute.NUM_DISTINCT_PEER_GROUPS,
        Attribute.LARGEST_PEER_GROUP_WORLD_SIZE,
        Attribute.GLOBAL_WORLD_SIZE,
    )
    while True:
        groups, largest, peers = map(communicator.get_attribute, attributes)
        if (groups, largest, peers) == tuple(map(communicator.get_attribute, attributes)):
            return groups, largest, peers
