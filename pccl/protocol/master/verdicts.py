"""Verdicts on ops: commit or abort, decided once and for all peers of a ring.

Peers start ops by themselves. In a mesh they also complete them by themselves (`completion`), so the master handles
only ops that take long or that a peer gives up. In other groups peers report every done op (`run_state.Ledger`).

    1  A verdict is decided once, and sent to each peer of the ring before any message that depends on it.
    2  If a peer gives up an op, the master holds an *abort vote*: every participant either reports that it has
       committed the op or promises not to. The op is aborted if none has committed it.
    3  A *flush* asks every survivor for its done ops. The ops that all survivors have done are committed, all others
       aborted. These verdicts are sent with the next Prepare, so a view separates ops (virtual synchrony).
    4  Use counts of tags start at 0 in every epoch. A group that has used too many tags gets a new epoch with the same
       ring; while it is idle, a lower limit applies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from pccl.protocol import completion
from pccl.protocol import messages as m
from pccl.protocol.completion import ranks_of
from pccl.protocol.master.run_state import Group, Ledger, Member, OpenAbortVote, RunState
from pccl.protocol.messages import OpRef
from pccl.types import Result


class OpVerdicts:
    def __init__(
        self,
        state: RunState,
        evict: Callable[[int, str, Result], None],
        committed: Callable[[Group], None],
        abort_deadlocked: Callable[[Group, OpRef, OpenAbortVote], None],
        may_be_meshed: Callable[[Group], bool],
    ) -> None:
        """`committed` is called for each group that commits ops. `abort_deadlocked` is called after an abort vote that
        a deadlock caused. `may_be_meshed` returns whether a group would be a mesh in a new epoch."""
        self._state = state
        self._evict = evict
        self._committed = committed
        self._abort_deadlocked = abort_deadlocked
        self._may_be_meshed = may_be_meshed

    # Messages from peers.

    def ops_done(self, member: Member, message: m.OpsDone) -> None:
        group = self._group(member, message.epoch)
        if group is None or member.peer not in group.ledger.ring:
            return
        commits = group.ledger.done(member.peer, message.ops)
        if commits and not group.running:
            # Decided during a flush, so sent with the next Prepare.
            group.commits += commits
            group.open_ops.update(commits)
        elif commits:
            self._commit(group, commits)

    def ops_stalled(self, member: Member, message: m.OpsStalled) -> None:
        group = self._running_group(member, message.epoch)
        if group is not None:
            group.ledger.stall(member.peer, message.ops)

    def ops_over(self, member: Member, message: m.OpsOver) -> None:
        group = self._group(member, message.epoch)
        if group is not None:
            group.ledger.over(member.peer, message.ops)

    def op_failed(self, member: Member, message: m.OpFailed) -> None:
        if message.code not in m.FAILURES:
            self._evict(member.peer, f"malformed OpFailed with code {message.code}", Result.INVALID_USAGE)
            return
        group = self._running_group(member, message.epoch)
        if group is None:
            return
        op = OpRef(message.tag, message.sequence)
        if not message.may_be_done:
            # No peer has committed it or ever will.
            self.abort(group, op, message.code, message.reason)
        elif op in group.votes:
            self._note_vote(group, op, member.peer)
        elif member.peer in group.participants(op):
            self.call_vote(group, op, message.code, message.reason, by=member.peer)

    def voted(self, member: Member, message: m.AbortVote) -> None:
        group = self._state.group_of(member)
        op = OpRef(message.tag, message.sequence)
        if message.epoch == group.epoch and group.running and op in group.votes:
            if not message.is_committed:
                self._note_vote(group, op, member.peer)
            elif group.ledger.decide(op):
                self._commit(group, [op])
        self._state.answered(member)

    def tags_used(self, member: Member, message: m.TagsUsed) -> None:
        group = self._running_group(member, message.epoch)
        if group is not None:
            self._renew(group, f"the last one used {message.tags} tags")

    def _group(self, member: Member, epoch: int) -> Group | None:
        group = self._state.groups.get(member.hello.group)
        return group if group is not None and group.epoch == epoch else None

    def _running_group(self, member: Member, epoch: int) -> Group | None:
        group = self._group(member, epoch)
        return group if group is not None and group.running else None

    # Verdicts.

    def _commit(self, group: Group, commits: list[OpRef]) -> None:
        state = self._state
        for op in commits:
            group.votes.pop(op, None)
        of_all = m.OpsCommit(group.epoch, [op for op in commits if ranks_of(op.tag) is None])
        if of_all.ops:
            for peer in group.ring:
                state.send_to(peer, of_all)
        for op in commits:
            if ranks_of(op.tag) is not None:
                for peer in group.participants(op):
                    state.send_to(peer, m.OpsCommit(group.epoch, [op]))
        self._committed(group)
        self.renew_if_full(group)

    def abort(self, group: Group, op: OpRef, code: int, reason: str, without: Collection[int] = frozenset()) -> None:
        """Abort an op on all its participants. The peers in `without` have not launched it, and their group calls fail
        for the same reason."""
        if not group.ledger.decide(op):
            return
        group.votes.pop(op, None)
        self._state.log(
            "info",
            f"group {group.number}, tag {op.tag}, use {op.sequence}: aborted: {reason}",
            {"group": group.number, "tag": op.tag, "sequence": op.sequence},
        )
        abort = m.OpAbort(group.epoch, op.tag, op.sequence, code, reason)
        made = m.OpAbort(group.epoch, op.tag, op.sequence, code, reason, counts_as_made=True) if without else abort
        for peer in group.participants(op):
            self._state.send_to(peer, made if peer in without else abort)
        self.renew_if_full(group)

    def call_vote(
        self, group: Group, op: OpRef, code: int, reason: str, by: int = 0, is_deadlocked: bool = False
    ) -> None:
        if group.ledger.is_decided(op):
            return
        participants = group.participants(op)
        group.votes[op] = OpenAbortVote(code, reason, set(participants) - {by}, is_deadlocked)
        for peer in participants:
            if peer != by:
                self._state.request(peer, m.AbortVoteRequest(group.epoch, *op, code, reason))

    def _note_vote(self, group: Group, op: OpRef, peer: int) -> None:
        vote = group.votes[op]
        vote.awaiting.discard(peer)
        if vote.awaiting:
            return
        if vote.is_deadlocked:
            self._abort_deadlocked(group, op, vote)
        else:
            self.abort(group, op, vote.code, vote.reason)

    # Flushes.

    def flush_reply(self, member: Member, message: m.FlushReply) -> None:
        group = self._state.group_of(member)
        if message.flush != group.flush or member.peer not in group.awaiting_flush:
            return
        group.awaiting_flush.discard(member.peer)
        self._state.asked_at.pop(member.peer, None)
        self._note_verdicts(group, message.commits, message.aborts)
        group.open_ops.update(message.ops)
        # settle() would commit the same ops, but done() has removed them from the ledger.
        group.commits += group.ledger.done(member.peer, message.ops) if group.ledger.ring else []

    def _note_verdicts(self, group: Group, commits: Iterable[OpRef], aborts: Iterable[m.Aborted]) -> None:
        known = set(group.commits)
        group.commits += [op for op in commits if op not in known]
        group.aborts.update({OpRef(op.tag, op.sequence): op for op in aborts})
        group.ledger.forget([*commits, *group.aborts])

    def finish_flushes(self) -> bool:
        """Decide all open ops of groups whose survivors have answered. Return False if there is no such group."""
        settled = False
        for group in self._state.groups.values():
            if group.changed and not group.running and not group.awaiting_flush and group.ledger.ring:
                decided = group.ledger.settle(group.ring)
                if group.commits or decided:
                    self._committed(group)
                committed = {*group.commits, *decided}
                # Keep only commits of open ops; the others have ended at all peers.
                group.commits = [op for op in group.commits if op in group.open_ops] + decided
                for op, vote in group.votes.items():
                    if op not in committed:
                        group.aborts[op] = m.Aborted(*op, vote.code, vote.reason)
                group.votes.clear()
                group.ledger = Ledger(())
                settled = True
        return settled

    # Renewal.

    def renew_if_full(self, group: Group, is_idle: bool = False) -> None:
        """Start a new epoch with the same ring after too many tags. The limit is lower if no op is in flight."""
        tags = group.ledger.tags
        if group.running and completion.is_full(tags, is_idle or not group.ledger.entries):
            self._renew(group, f"the last one used {tags} tags")

    def renew_at_rest(self, group: Group) -> None:
        """Call `renew_if_full` while no op is in flight. Also renew the group if that makes it a mesh."""
        self.renew_if_full(group, is_idle=True)
        if self._may_be_meshed(group):
            self._renew(group, "its peers can now make the missing links")

    def _renew(self, group: Group, reason: str) -> None:
        self._state.log("info", f"group {group.number} begins a new epoch: {reason}", {"group": group.number})
        self._state.stop(group)
