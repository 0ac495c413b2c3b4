"""Missing links: pairs that a small group goes without a link between, and that are tried again.

One such pair costs the whole group the mesh, and with it the direct algorithm, `all_to_all` over direct links and
whatever else needs one. Often what kept the two apart is gone soon: a busy machine, a firewall's rule, a route.

    1  The end that dials is asked to connect to the other (`Trial`), a first time after RETRY_S and then after twice as
       long each time, RETRY_S_MAX at most. Nobody waits for the answer: no verdict, no view and no eviction depends on
       it.
    2  Once the last answers tell for all missing pairs of a group that packets get through, the group begins a new
       epoch with the same ring, whose Prepare makes the links as it makes any. It does so at the end of a joint call
       that all its peers are in without an op in flight, so that none is aborted by it.
    3  If a link cannot be made even so, the next epoch for its sake is as far away as the next answer, at least. Its
       delay is kept until the link stands.
    4  Links that broke again and again (`Group.unreliable`) are not tried, for they can be made. A group that has one
       is no mesh in any case.
"""

from __future__ import annotations

from dataclasses import dataclass

from pccl.protocol import messages as m
from pccl.protocol import topology
from pccl.protocol.master.run_state import Group, Member, Pair, RunState

RETRY_S = 5.0
RETRY_S_MAX = 300.0


@dataclass
class _Retry:
    due_at: float
    delay_s: float
    """Seconds between the next two tries."""
    works: bool = False
    """Whether the last try got through."""


def _is_small(group: Group) -> bool:
    """Whether the group may be a mesh."""
    return len(group.ring) <= topology.MESH_PEERS_MAX


class MissingLinks:
    """The missing links of one run."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._retries: dict[Pair, _Retry] = {}
        self._asked: dict[int, list[int]] = {}
        """The peers that a peer has been asked to connect to and has not answered of."""
        for group in state.groups.values():
            if group.running:
                self.formed(group)

    def formed(self, group: Group) -> None:
        """Note that a group's ring is in force, and which links it goes without."""
        now = self._state.now
        for pair in [pair for pair in self._retries if not set(pair).isdisjoint(group.ring)]:
            if pair not in group.missing:
                del self._retries[pair]
        for pair in group.missing if _is_small(group) else ():
            retry = self._retries.setdefault(pair, _Retry(0.0, RETRY_S))
            retry.due_at = now + retry.delay_s
            retry.works = False

    def may_stand(self, group: Group) -> bool:
        """Whether the group would be a mesh in a new epoch, by the last tries (rule 2)."""
        return bool(
            group.running
            and _is_small(group)
            and group.missing
            and not group.unreliable
            and all(pair in self._retries and self._retries[pair].works for pair in group.missing)
        )

    def try_again(self) -> None:
        """Have the pairs tried whose time has come."""
        state = self._state
        due: dict[int, list[int]] = {}
        for (low, high), retry in self._retries.items():
            if state.now >= retry.due_at:
                retry.delay_s = min(2 * retry.delay_s, RETRY_S_MAX)
                retry.due_at = state.now + retry.delay_s
                due.setdefault(high, []).append(low)
        for dialer, others in due.items():
            if dialer not in self._asked:
                self._asked[dialer] = others
                state.send(
                    state.members[dialer].connection, m.Trial([state.members[other].as_record() for other in others])
                )

    def tried(self, member: Member, message: m.Tried) -> None:
        """Hear with whom a peer that was asked could not connect."""
        failed = {peer for peer, _ in message.failed}
        for other in self._asked.pop(member.peer, ()):
            retry = self._retries.get((other, member.peer))
            if retry is None:
                continue  # one of the two is gone, or the link stands
            if not retry.works and other not in failed:
                text = f"peers {(other, member.peer)} have no link and can connect by now; the next joint call makes it"
                self._state.log("info", text, {**member.about, "other": other})
            retry.works = other not in failed

    def forget(self, peer: int) -> None:
        """Forget a peer that is gone."""
        self._asked.pop(peer, None)
        for pair in [pair for pair in self._retries if peer in pair]:
            del self._retries[pair]

    def deadlines(self) -> list[float]:
        """Return the time of the next try."""
        return [min(retry.due_at for retry in self._retries.values())] if self._retries else []
