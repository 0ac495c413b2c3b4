"""A model in shards over the ranks of a site, trained together with other sites.

Theory of operation. Within a site, where the network is fast, torch.distributed shards one model over some processes,
the *ranks* (as FSDP2, `torch.distributed.fsdp.fully_shard`, does). Between sites, ranks of one number hold the same
shard; they are a peer group, and each rank has a communicator of its own:

                rank 0    rank 1    rank 2
    site A      shard 0   shard 1   shard 2       each row: torch.distributed, gradients at every step
    site B      shard 0   shard 1   shard 2       each column: pccl, a peer group, once in many steps
                group 0   group 1   group 2

*Coming and going.* A rank is of no use without the others of its site, and worse: those of other sites would wait for
it, which waits for its mates. So the ranks of a site name it to the master, which admits all of them in one view and
drops all when one is lost (`Communicator(site=, site_size=)`). Whatever supervises the ranks should end them together,
too. A loss reaches the groups one by one: the average of one shard may still have the lost site's part in it and that
of another not. Each is an average over sites, and each shard is the same on all sites.

*Same decisions.* Ranks of a site must not part ways over what only some of them have seen. Whether newcomers wait
is the same answer for the whole run; whether enough sites are there to start, each group finds out by itself, and
the ranks of a site then `agree`, over the network of the site: since every group has one result on all sites, all
sites come to the same.

*The grid must be complete*: as many ranks at every site, and one peer for each site and rank. A newcomer checks it
when it has been admitted, and fails with INVALID_USAGE where it is not so. That the mesh, the placements and the shard
are those of the others' is checked with names, shapes and dtypes when the state is synchronized: INVALID_ARGUMENT.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from typing import Any

from pccl import Attribute, Communicator, PCCLError, Result


class Site:
    """The place of this rank in a grid of sites and ranks. Not thread-safe; all ranks of the site make the same calls
    in the same order."""

    def __init__(
        self,
        name: str,
        rank: int,
        size: int,
        agree: Callable[[bool], bool],
        gather: Callable[[str], list[str]] | None = None,
    ) -> None:
        """`name`: the same on all ranks, and of no other start of a site. `agree(flag)` tells all ranks whether all of
        them gave True. `gather(text)` tells all what each gave, by rank; without it that takes some votes for each
        letter."""
        self.rank = rank
        self.size = size
        self.agree = agree
        self._name = name
        self._gather = gather
        self._communicators = 0
        self._names = 0

    @classmethod
    def of_process_group(cls, group: Any = None) -> Site:
        """Make the site of a torch.distributed process group (None: the default one), all ranks of which call this."""
        torch = sys.modules["torch"]
        dist = torch.distributed
        ranks = dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)
        # Of its own, so that it cannot come between the program's collectives, and on the CPU.
        own = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        names = [uuid.uuid4().hex]
        dist.broadcast_object_list(names, src=ranks[0], group=own)

        def agree(flag: bool) -> bool:
            vote = torch.tensor([flag], dtype=torch.int32)
            dist.all_reduce(vote, op=dist.ReduceOp.MIN, group=own)
            return bool(vote.item())

        def gather(text: str) -> list[str]:
            told: list[Any] = [None] * len(ranks)
            dist.all_gather_object(told, text, group=own)
            return told

        return cls(names[0], dist.get_rank(own), len(ranks), agree, gather)

    def gather(self, text: str) -> list[str]:
        """Return what each rank gave, by rank."""
        if self._gather is not None:
            return self._gather(text)
        return [self._told_by(rank, text) for rank in range(self.size)]

    def _told_by(self, rank: int, text: str) -> str:
        """Return the text of one rank, found by votes: all others vote for every bit, so that the result is the rank's
        own vote."""
        mine = text.encode()

        def told(number: int, bits: int) -> int:
            votes = [self.agree(rank != self.rank or bool(number >> i & 1)) for i in range(bits)]
            return sum(vote << i for i, vote in enumerate(votes))

        count = told(len(mine), 32)
        mine = mine if rank == self.rank else bytes(count)
        return bytes(told(byte, 8) for byte in mine).decode()

    def unique_name(self) -> str:
        """A new name, the same on all ranks if they ask as often."""
        self._names += 1
        return f"{self._name}.{self._names}"

    def communicator(self, address: str, **options: Any) -> Communicator:
        """Return a communicator of this rank, in the peer group of its shard; `options` are those of `Communicator`.
        Also for going on after the run was lost: call it again, on all ranks of the site."""
        self._communicators += 1
        name = f"{self._name}.{self._communicators}"
        return Communicator(address, peer_group=self.rank, site=name, site_size=self.size, **options)

    def check(self, communicator: Communicator) -> None:
        """PCCLError INVALID_USAGE, on all ranks alike, if the peers of the run are no grid of sites with as many ranks
        as this one."""
        groups, largest, peers = _shape(communicator)
        # Together: without those of its ranks that have found out and left, a site may look like one that fits.
        if not self.agree(groups == self.size and peers == groups * largest):
            raise PCCLError(
                Result.INVALID_USAGE,
                "join",
                f"this site has {self.size} ranks, but the run has {peers} peers in {groups} peer groups, of at most "
                f"{largest}: all sites must have as many ranks, each in the peer group of its number",
            )


def _shape(communicator: Communicator) -> tuple[int, int, int]:
    """Groups, peers of the largest, and all peers, of one view."""
    attributes = (
        Attribute.NUM_DISTINCT_PEER_GROUPS,
        Attribute.LARGEST_PEER_GROUP_WORLD_SIZE,
        Attribute.GLOBAL_WORLD_SIZE,
    )
    while True:
        groups, largest, peers = map(communicator.get_attribute, attributes)
        if (groups, largest, peers) == tuple(map(communicator.get_attribute, attributes)):
            return groups, largest, peers
