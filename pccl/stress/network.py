"""The network between the processes of a run: who is told to drop whose packets while partitions are active."""

from __future__ import annotations

from collections.abc import Iterable

from pccl.launcher import Child
from pccl.stress.messages import DropFrom, line
from pccl.stress.packet_filter import HeldPort, Place, place
from pccl.stress.partitions import MASTER, Partitions
from pccl.stress.peer import Peer
from pccl.stress.seats import Seats
from pccl.stress.values import SLOTS


class Network:
    """Carries out what `Partitions` decides."""

    def __init__(self, partitions: Partitions, seats: Seats, is_partitioned: bool) -> None:
        """`is_partitioned`: there are partitions in this run, so each peer has a place of its own."""
        self._partitions = partitions
        self._seats = seats
        self._ports = [HeldPort() for _ in range(SLOTS if is_partitioned else 0)]
        self._told: dict[Child, list[int]] = {}

    def place_of(self, slot: int) -> Place | None:
        """Return the place that a peer in this slot must take, or a master's; None where there are no partitions."""
        if slot <= MASTER:
            return self._seats.all[MASTER - slot].place
        return place(slot, self._ports[slot].number) if self._ports else None

    def tell(self, peers: Iterable[Peer]) -> None:
        """Tell every process whose packets to drop, where that has changed."""
        slots = {seat.process: MASTER - seat.number for seat in self._seats.all}
        slots.update((peer.process, peer.slot) for peer in peers)
        self._told = {process: senders for process, senders in self._told.items() if process in slots}
        for process, slot in slots.items():
            senders = self._partitions.blocked_for(slot)
            if senders != self._told.get(process, []):
                self._told[process] = senders
                places = [self.place_of(sender) for sender in senders]
                process.say(line(DropFrom([each for each in places if each is not None])))

    def close(self) -> None:
        for port in self._ports:
            port.close()
