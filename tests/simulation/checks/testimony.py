"""Checks of what a peer says of itself, by what it has heard and said before: a master that leads next knows no better.

the views that it tells of are those that it was told of, and it has answered those that it says it has answered
verdicts that it has heard, or reached without a master, are among those that it tells, and its ops are done that it
says are done; so are commits of a master that has stopped its ops since, and that its engine lags behind
it answers a view to the master that has announced it
the outcomes of group calls that it tells are those that it has heard
a state that it offers is the one that it has
a vote for a commit, or that an op is not done, is true
of ops that no master decides it says that they are done where it has said that it waits for them, and else not
an update_topology ends without the master's word only if newcomers came by that very call
the next master hears of all that was promised, given up or lost under the last one
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass, field

from pccl.protocol import messages as m
from pccl.types import Result
from tests.simulation.checks.facts import PAIR_BIT, Facts
from tests.simulation.node import Key, Node

Ref = tuple[int, int]
"""The name of an op within its epoch: tag and sequence."""


@dataclass
class _Known:
    """What one peer has heard and said."""

    tenure: int = 0
    """The number of masters that have led it."""
    installed: int = 0
    epoch: int = 0
    is_meshed: bool = False
    prepared: int = 0
    prepared_epoch: int = 0
    """The epoch of its ring in that view."""
    prepared_in: int = 0
    """The tenure when it learned of that view."""
    announced: dict[int, int] = field(default_factory=dict)
    """The tenure when it learned of each view."""
    has_answered: bool = False
    """It has answered that view, and no master has ruled it out since."""
    answered: set[int] = field(default_factory=set)
    """Older views that it answered."""
    is_stopped: bool = False
    """Its ops were stopped or settled in this epoch."""
    was_stopped: bool = False
    """They were before its present turn."""
    commits: set[Ref] = field(default_factory=set)
    """The ops of this epoch that masters have said are committed."""
    aborts: set[Ref] = field(default_factory=set)
    """Those that they have said are aborted, when it had none of it or waited in it."""
    promised: set[Ref] = field(default_factory=set)
    """Those that it has said it will not commit."""
    outcomes: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Number, code and value of the last call of each kind whose end it has heard."""
    synced: tuple[int, int] | None = None
    owed: set[str] = field(default_factory=set)
    """What it has yet to say to a master that goes on with it."""
    stalled: set[Ref] = field(default_factory=set)
    """The ops of this epoch where it has told this master that it waits."""
    done_unasked: set[Ref] = field(default_factory=set)
    """Those that it has just said are done, though it had not said that it waits for them. It may say so next."""
    admission: int = 0
    """The update_topology that was under way when newcomers last came."""
    told_ends: set[int] = field(default_factory=set)
    """The group calls of whose end a master has told."""


class Testimony:
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._known: dict[Node, _Known] = {}
        self._asked: dict[Node, _Known] = {}
        """What peers knew when they were asked for it: they may have heard more since, in the same turn."""

    def _of(self, node: Node) -> _Known:
        known = self._known.get(node)
        if known is None:
            known = self._known[node] = _Known()
        return known

    # What it hears.

    def heard(self, node: Node, message: m.Message) -> None:
        """Note what a peer hears, before it acts on it."""
        known = self._of(node)
        if isinstance(message, m.PreVoteRequest | m.VoteRequest):
            self._asked[node] = deepcopy(known)
        elif isinstance(message, m.Welcome):
            self._known[node] = _Known(known.tenure + 1)
        elif isinstance(message, m.Resumed):
            known.tenure += 1
            known.answered &= set(message.in_force)
            known.has_answered = known.has_answered and known.prepared in message.in_force
            known.stalled.clear()
            self._owe(node, known)
        elif isinstance(message, m.StartOver):
            self._known[node] = _Known(known.tenure)
        elif isinstance(message, m.Flush):
            known.is_stopped = True
            self._forgive_done(known)
        elif isinstance(message, m.Prepare):
            self._prepare(node, known, message)
        elif isinstance(message, m.Install):
            self._install(node, known, message)
        elif isinstance(message, m.OpsCommit):
            known.commits |= {(op.tag, op.sequence) for op in message.ops}
        elif isinstance(message, m.OpAbort):
            self._abort(node, known, (message.tag, message.sequence))
        elif isinstance(message, m.GroupCallResult):
            self._group_call_result(node, known, message)

    def _group_call_result(self, node: Node, known: _Known, message: m.GroupCallResult) -> None:
        known.told_ends.add(message.call)
        if message.call_number:
            kind = node.kinds[message.call]
            known.outcomes[kind] = message.call_number, message.code, message.value
            if kind == m.Kind.SYNC and message.code == Result.SUCCESS:
                known.synced = message.call_number, message.value

    def _prepare(self, node: Node, known: _Known, message: m.Prepare) -> None:
        if known.has_answered and known.prepared_in != known.tenure:
            known.answered.add(known.prepared)
        known.prepared, known.prepared_in, known.has_answered = message.view, known.tenure, False
        known.announced[message.view] = known.tenure
        known.prepared_epoch = next(ring.epoch for ring in message.rings if node.number in ring.peers)
        known.is_meshed = False
        if known.prepared_epoch != known.epoch:
            known.is_stopped = True
            known.promised.clear()
            known.owed.clear()
            known.commits |= {(op.tag, op.sequence) for op in message.commits}
            for op in message.aborts:
                self._abort(node, known, (op.tag, op.sequence))

    def _install(self, node: Node, known: _Known, message: m.Install) -> None:
        listed = self._facts.listed
        if known.installed and listed.get(message.view, set()) - listed.get(known.installed, set()):
            known.admission = next(iter(node.open_calls), 0)
        known.installed = message.view
        if known.epoch != known.prepared_epoch:
            known.is_stopped = False
            known.stalled.clear()
            known.commits.clear()
            known.aborts.clear()
            known.promised.clear()
            known.owed.clear()
        known.epoch, known.prepared, known.has_answered = known.prepared_epoch, 0, False
        known.answered.clear()

    def _abort(self, node: Node, known: _Known, ref: Ref) -> None:
        known.promised.discard(ref)
        known.owed -= {_promise(ref), _done(ref)}
        key = node.group, known.epoch, *ref
        if not any(node.keys.get(op) == key for op in node.results):
            known.aborts.add(ref)

    # What it says.

    def says(self, node: Node, message: m.Message) -> None:
        """Check what a peer says to its master."""
        known = self._of(node)
        if isinstance(message, m.OpsStalled):
            known.stalled |= {(op.tag, op.sequence) for op in message.ops}
            known.done_unasked -= known.stalled
        unasked = known.done_unasked
        assert not unasked, f"{node} says that {unasked} are done, of which no master decides"
        if isinstance(message, m.LinksReady):
            is_asked = known.announced.get(message.view) == known.tenure
            assert is_asked, f"{node} answers view {message.view}, which this master has not announced to it"
            known.has_answered = known.has_answered or message.view == known.prepared
        elif isinstance(message, m.PreVote):
            self._views(node, self._asked[node], message)
        elif isinstance(message, m.Vote):
            self._report(node, self._asked[node], message.report)
        elif isinstance(message, m.FlushReply):
            self._flush_reply(node, known, message)
        elif isinstance(message, m.AbortVote):
            self._vote(node, known, message)
        elif isinstance(message, m.OpFailed):
            self._failed(node, known, message)
        elif isinstance(message, m.GroupCall):
            known.owed.discard(f"call {message.call}")
            if message.offer is not None:
                self._offer(node, message.offer)
        elif isinstance(message, m.OpsDone):
            self._done(node, known, message)
        elif isinstance(message, m.GroupCallCancel):
            known.owed.discard(f"the end of call {message.call}")
        elif isinstance(message, m.LinkLost):
            stands = [
                link.effect.link
                for link in node.links.values()
                if link.effect.member.peer == message.peer
                and link.effect.made_in >= message.made_in
                and link.is_complete
            ]
            assert not stands, f"{node} says that it has lost its link with peer {message.peer}, which stands"

    def finds_done(self, node: Node, op: int) -> None:
        """Note that a peer is about to find an op done."""
        known = self._of(node)
        key = node.keys[op]
        is_running = key[1] == known.epoch and not known.is_stopped and self._is_led(node)
        if is_running and key[2:] in known.stalled - known.aborts - known.commits and op not in node.results:
            known.owed.add(_done(key[2:]))

    def call_ends(self, node: Node, call: int, code: Result) -> None:
        """Check a group call that ends at its caller."""
        known = self._of(node)
        if node.kinds[call] == m.Kind.UPDATE_TOPOLOGY and code is Result.SUCCESS and call not in known.told_ends:
            assert call == known.admission, f"{node} ends an update_topology that its master has not ended"

    def turn_ends(self, node: Node) -> None:
        """Check that a peer has said what it had to say at once."""
        if node.is_reachable and not node.unfinished and not node.is_frozen and node.control is not None:
            known = self._of(node)
            if not self._is_led(node):
                self._forgive_done(known)
            known.was_stopped, owed = known.is_stopped, known.owed
            assert not owed, f"{node} does not tell its master of {owed}"

    def succeeds(self, node: Node, key: Key) -> None:
        """Check an op that ends with success at a peer."""
        known = self._of(node)
        is_over = known.prepared and known.prepared_epoch != known.epoch
        is_stopped = known.is_stopped and known.was_stopped and not is_over and key[:2] == (node.group, known.epoch)
        has_promised = key[2:] in known.promised
        assert not (is_stopped and has_promised), f"{node} commits {key}, which it has promised not to"

    def _done(self, node: Node, known: _Known, message: m.OpsDone) -> None:
        for op in message.ops:
            ref = op.tag, op.sequence
            known.owed.discard(_done(ref))
            is_mutual = bool(op.tag & PAIR_BIT) or node.view.is_meshed
            if is_mutual and ref not in known.stalled:
                known.done_unasked.add(ref)

    @staticmethod
    def _is_led(node: Node) -> bool:
        """Whether a master hears what a peer says."""
        return node.control is not None and node.control is node.led_over and node.masterless_since is None

    @staticmethod
    def _forgive_done(known: _Known) -> None:
        """A flush asks for all that is done, and so does the next master."""
        known.owed -= {_done(ref) for ref in known.stalled}

    def _views(self, node: Node, known: _Known, said: m.PreVote | m.RecoveryReport) -> None:
        installed = said.installed.view if said.installed is not None else 0
        assert installed == known.installed, f"{node} is in view {known.installed} and says {installed}"
        prepared = (said.prepared.view, said.prepared.answered) if said.prepared is not None else (0, False)
        assert prepared == (known.prepared, known.has_answered and bool(known.prepared)), (
            f"{node} was told to prepare view {known.prepared}, answered: {known.has_answered}; it says {prepared}"
        )
        answered = {each.view for each in said.answered}
        assert answered == known.answered, f"{node} has answered {known.answered} before and says {answered}"
        has_decided = bool(known.prepared) and bool(known.epoch) and known.prepared_epoch != known.epoch
        assert said.has_decided == has_decided, f"{node} says that its ops are settled: {said.has_decided}"

    def _report(self, node: Node, known: _Known, report: m.RecoveryReport) -> None:
        self._views(node, known, report)
        if not known.installed:
            return
        assert report.is_running == (not known.is_stopped), f"{node} says that its ops run: {report.is_running}"
        assert report.synced == known.synced, f"{node} has synced in {known.synced} and says {report.synced}"
        told = {each.kind: (each.call_number, each.code, each.value) for each in report.outcomes}
        for kind, outcome in known.outcomes.items():
            assert told.get(kind, (0,))[0] >= outcome[0], f"{node} has heard {kind} end with {outcome} and says {told}"
        commits, aborts = self._verdicts(node, known, is_without_master=False)
        _check_told(node, commits, aborts, report.commits, report.aborts)

    def _flush_reply(self, node: Node, known: _Known, reply: m.FlushReply) -> None:
        commits, aborts = self._verdicts(node, known, is_without_master=True)
        _check_told(node, commits, aborts if reply.commits else set(), reply.commits, reply.aborts)
        done = {(op.tag, op.sequence) for op in reply.ops}
        held = {key[2:] for key in node.held if key[:2] == (node.group, known.epoch)}
        assert done <= held, f"{node} says that {done - held} are done"
        open_ones = {node.keys[op][2:] for op in node.open_ops if op in node.keys and node.keys[op][1] == known.epoch}
        told = {(op.tag, op.sequence) for op in reply.commits}  # perhaps before its caller hears of it
        unsaid = (open_ones & known.commits) - told
        assert not unsaid, f"{node} does not say that {unsaid} are committed, which it is about to end"
        silent = (held & open_ones) - done - told - known.aborts
        assert not silent, f"{node} does not say that {silent} are done"

    def _verdicts(self, node: Node, known: _Known, is_without_master: bool) -> tuple[set[Ref], set[Ref]]:
        """Return the commits and aborts of this epoch that a peer has to tell: its own, or all that it knows."""
        ended = {node.keys[op]: node.results[op].code for op in node.results if op in node.keys}
        epoch = node.group, known.epoch
        ours = {key[2:] for key, code in ended.items() if key[:2] == epoch and code is Result.SUCCESS}
        if is_without_master:
            return ours - known.commits, set()
        return ours | known.commits, known.aborts - ours

    def _vote(self, node: Node, known: _Known, vote: m.AbortVote) -> None:
        ref = vote.tag, vote.sequence
        if not vote.is_committed:
            if ref not in known.aborts:  # otherwise it has heard the verdict in the same turn
                known.promised.add(ref)
            known.owed.discard(_promise(ref))
            return
        key = node.group, vote.epoch, *ref
        is_committed = ref in known.commits or (vote.epoch, *ref) in node.fast_path.ran
        is_committed = is_committed or any(
            node.keys.get(op) == key and result.code is Result.SUCCESS for op, result in node.results.items()
        )
        assert is_committed, f"{node} votes that it has committed {key}, and has not"

    def _failed(self, node: Node, known: _Known, message: m.OpFailed) -> None:
        ref = message.tag, message.sequence
        known.owed.discard(_promise(ref))
        key = node.group, message.epoch, *ref
        op = next((op for op in node.launched if node.keys.get(op) == key), None)
        is_mutual = bool(message.tag & PAIR_BIT) or (bool(node.views) and node.view.is_meshed)
        if message.may_be_done:
            known.promised.add(ref)
        elif is_mutual and op is not None:
            # Its engine has refused it, or has stopped it before it was done.
            is_stopped = key in node.stopped and key not in node.held
            assert op in node.refuses or is_stopped, f"{node} gives up {key} as if it could not be done"

    def _offer(self, node: Node, offer: m.SyncOffer) -> None:
        if offer.strategy != "receive_only":
            assert offer.root == node.root, f"{node} offers {offer.root!r} and has {node.root!r}"

    def _owe(self, node: Node, known: _Known) -> None:
        known.owed.clear()
        if not known.installed:
            return
        if not known.is_stopped:
            ended = {node.keys[op][2:] for op in node.results if op in node.keys and node.keys[op][1] == known.epoch}
            known.owed |= {_promise(ref) for ref in known.promised - ended}
        for call in node.open_calls[:1]:
            known.owed.add(f"call {call}")
            if call in node.given_up:
                known.owed.add(f"the end of call {call}")


def _promise(ref: Ref) -> str:
    return f"the promise not to commit {ref}"


def _done(ref: Ref) -> str:
    return f"the end of its wait for {ref}"


def _check_told(
    node: Node, commits: set[Ref], aborts: set[Ref], said: Iterable[m.OpRef], said_aborts: Iterable[m.Aborted]
) -> None:
    """Check that a peer tells these verdicts. The last commit of a tag stands for all uses before it."""
    last = {op.tag: op.sequence for op in sorted(said, key=lambda op: op.sequence)}
    missing = {ref for ref in commits if last.get(ref[0], -1) < ref[1]}
    assert not missing, f"{node} does not tell that {missing} are committed"
    told = {(op.tag, op.sequence) for op in said_aborts}
    missing = {ref for ref in aborts - told if last.get(ref[0], -1) < ref[1]}
    assert not missing, f"{node} does not tell that {missing} are aborted"
