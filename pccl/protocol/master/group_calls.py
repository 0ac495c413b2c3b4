"""Group calls: when one is complete, and which of them are deadlocked.

1  A call is complete when all accepted peers wait in it: those of the group for sync_shared_state, of the run
   otherwise. A lost peer is removed from it.
2  A call that ended under an earlier master ends in the same way for a peer that has not received its end.
3  Calls are deadlocked if all peers of a group, or of the run, wait in different calls, or if a peer waits in a call
   while another has long waited for an op of that peer. Then are_peers_pending returns False; without such a caller
   the calls and the op fail with INVALID_USAGE and the list of waits. The answer names the calls of the others
   (`PendingAnswer`), so a gathering peer joins their update_topology.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pccl.protocol import completion
from pccl.protocol import messages as m
from pccl.protocol.master.admission import Admission
from pccl.protocol.master.ring import RingChange
from pccl.protocol.master.run_state import Group, Member, OpenAbortVote, RunState, Wait, Waits
from pccl.protocol.master.state_sync import StateSync
from pccl.protocol.master.verdicts import OpVerdicts
from pccl.protocol.messages import Kind, OpRef, PendingAnswer
from pccl.protocol.point_to_point import callers_tag
from pccl.types import Result


class GroupCalls:
    def __init__(
        self,
        state: RunState,
        waits: Waits,
        admission: Admission,
        verdicts: OpVerdicts,
        state_sync: StateSync,
        ring_change: RingChange,
        evict: Callable[[int, str, Result], None],
        unheard: Mapping[int, m.GroupCallOutcome] | None = None,
    ) -> None:
        """`unheard` are peers that wait in a group call which has ended under a master before this one, with that
        end."""
        self._state = state
        self._waits = waits
        self._admission = admission
        self._verdicts = verdicts
        self._state_sync = state_sync
        self._ring_change = ring_change
        self._evict = evict
        self._unheard = dict(unheard or {})
        self.is_updating = False
        """Whether an update_topology is complete and waits for Install."""

    # What peers say.

    def enter(self, member: Member, message: m.GroupCall) -> None:
        if message.kind not in Kind.ALL or (message.kind == Kind.SYNC) != (message.offer is not None):
            self._evict(member.peer, f"malformed group call {message.kind!r}", Result.INVALID_USAGE)
        elif member.wait is not None:
            self._evict(member.peer, "a group call out of turn", Result.INVALID_USAGE)
        else:
            self._waits.enter(member, message)

    def cancel(self, member: Member, message: m.GroupCallCancel) -> None:
        wait = member.wait
        if wait is None or wait.call != message.call:
            return
        begun = (
            (wait.kind == Kind.UPDATE_TOPOLOGY and self.is_updating)
            or (wait.kind == Kind.OPTIMIZE_TOPOLOGY and self._ring_change.is_under_way)
            or (wait.kind == Kind.SYNC and self._state.group_of(member).sync is not None)
            or member.peer in self._unheard
        )
        if not begun:
            self._waits.answer(member, Result.TIMEOUT, "cancelled by its caller")

    def forget(self, member: Member) -> None:
        """Forget a peer that is gone. Its group still has it in the ring."""
        self._unheard.pop(member.peer, None)
        self._waits.forget(member)

    # Complete calls.

    def step(self) -> bool:
        """Carry out one group call that has become complete. Return False if there is none."""
        state = self._state
        if not state.accepted_count:
            self._ring_change.forget_all()
            return False
        if state.accepted_count < sum(len(group.ring) for group in state.groups.values()):
            # Accepted, but their view is not installed yet: they take part in the next call.
            return False
        if any(state.members[peer].wait is not None for peer in self._unheard):
            # Such a call must not be taken for one that begins now, so all others wait, too.
            if state.is_changing:
                return False
            if self._tell_unheard():
                return True
        waiting = self._waits.waiting
        kind = next((kind for kind, number in waiting.items() if number == state.accepted_count), None)
        if kind == Kind.ARE_PEERS_PENDING:
            self._finish_all(kind, value=len(self._admission.admissible))
            return True
        if kind == Kind.UPDATE_TOPOLOGY and not state.is_changing and not self.is_updating:
            admissible = set(self._admission.admissible)
            if admissible:
                self.is_updating = True
                state.change.admitting = admissible
            else:
                self._finish_all(kind)
            return True
        if kind == Kind.OPTIMIZE_TOPOLOGY and not state.is_changing:
            is_over = self._ring_change.step()
            if is_over:
                self._finish_all(kind)
            return is_over is not None
        return self._state_sync.step()

    def view_installed(self) -> None:
        if self.is_updating:
            self.is_updating = False
            self._finish_all(Kind.UPDATE_TOPOLOGY)

    def _tell_unheard(self) -> bool:
        progress = False
        for peer, end in list(self._unheard.items()):
            member = self._state.members[peer]
            if member.wait is not None:
                del self._unheard[peer]
                if member.wait.kind == end.kind:
                    self._waits.answer(member, Result(end.code), end.reason, end.value, end.call_number)
                    progress = True
        return progress

    def _finish_all(self, kind: str, value: int = 0) -> None:
        for group in self._state.groups.values() if kind in Kind.EXCLUSIVE else ():
            self._verdicts.renew_at_rest(group)
        self._waits.finish(self._state.members.values(), kind, value=value)

    # Hopeless calls.

    def end_deadlocked(self) -> None:
        if self._state.is_changing or self.is_updating or self._ring_change.is_under_way:
            return
        while self._end_first_deadlocked():
            pass

    def _end_first_deadlocked(self) -> bool:
        state = self._state
        for group in state.groups.values():
            waiting = group.waiting.total()
            if not waiting:
                continue
            if waiting == len(group.ring) and waiting not in group.waiting.values():
                self._end_all(group.ring)
                return True
            stalled = group.ledger.stalled.items() if group.running else ()
            if any(self._end_behind(group, op, stuck) for op, stuck in list(stalled)):
                return True
        if 0 < state.accepted_count == sum(self._waits.waiting[kind] for kind in Kind.GLOBAL):
            # Were they all in one call, it would be complete.
            self._end_all(state.accepted)
            return True
        return False

    def _account(self, waits: Mapping[int, Wait]) -> str:
        members = self._state.members
        return ", ".join(f"{members[peer]} in {wait.kind}" for peer, wait in sorted(waits.items()))

    def _end_all(self, peers: Iterable[int]) -> None:
        waits = self._waits.of(peers)
        others = {wait.kind for wait in waits.values()} - {Kind.ARE_PEERS_PENDING}
        answer = PendingAnswer.ADMITTING if others == {Kind.UPDATE_TOPOLOGY} else PendingAnswer.ELSEWHERE
        self._end(waits, f"these calls can never meet: {self._account(waits)}", answer)

    def _end_behind(self, group: Group, op: OpRef, stuck: set[int]) -> bool:
        """End the group calls of peers that would have to launch `op` first, which `stuck` peers wait in. Return False
        if there are none."""
        waits = self._behind(group, op, stuck)
        if not waits or op in group.votes:
            return False
        reason = (
            f"peers {sorted(stuck)} wait in the op with tag {callers_tag(op.tag)}, which these never launched: "
            f"{self._account(waits)}"
        )
        if all(wait.kind in Kind.EXCLUSIVE for wait in waits.values()):
            if completion.is_mutual(op.tag, group.is_mutual):
                # For all that is known here they have launched it, and it is over for them.
                self._verdicts.call_vote(group, op, Result.INVALID_USAGE, reason, is_deadlocked=True)
                return False
            self._verdicts.abort(group, op, Result.INVALID_USAGE, reason, without=waits)
        self._end(waits, reason)
        return True

    def abort_deadlocked(self, group: Group, op: OpRef, vote: OpenAbortVote) -> None:
        """Abort an op after the abort vote for deadlocked calls: no peer has committed it."""
        waits = self._behind(group, op, group.ledger.stalled.get(op, set()))
        waits = {peer: wait for peer, wait in waits.items() if wait.kind in Kind.EXCLUSIVE}
        self._verdicts.abort(group, op, vote.code, vote.reason, without=waits)
        if waits:
            self._end(waits, vote.reason)

    def _behind(self, group: Group, op: OpRef, stuck: set[int]) -> dict[int, Wait]:
        return {
            peer: wait
            for peer, wait in self._waits.of(group.participants(op)).items()
            if peer not in stuck
            and (wait.kind in Kind.EXCLUSIVE or (wait.kind == Kind.ARE_PEERS_PENDING and op not in wait.open_ops))
        }

    def _end(self, waits: Mapping[int, Wait], reason: str, answer: int = PendingAnswer.ELSEWHERE) -> None:
        members = self._state.members
        asking = [peer for peer, wait in waits.items() if wait.kind == Kind.ARE_PEERS_PENDING]
        self._state.log("info" if asking else "warning", reason)
        for peer in asking or waits:
            if asking:
                self._waits.answer(members[peer], Result.SUCCESS, reason, answer)
            else:
                self._waits.answer(members[peer], Result.INVALID_USAGE, reason)
