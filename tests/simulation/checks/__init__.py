"""Checks of what must hold in every run, made without any code of the machines, and without a look into them.

`Checks` is told what is on the wire between masters and peers, what callers do and hear, and what the engines hold,
which are the simulation's own. It raises AssertionError for what must not be.

    facts         what messages have shown, the base of the others
    leaders       masters that lead, and peers that they lead
    views         membership, as callers see it
    verdicts      how ops end
    takeover      what a master does with a run that it takes over
    group_calls   how group calls end, and the contents after syncs
    rings         rings that searches find
    testimony     what peers say of themselves
    conduct       what masters say, and why
    rest          waits without an end

What cannot be judged from outside is left to the tests of the machines: whether a master that could go on waits for
longer than it should, as long as it goes on in the end; what it would have decided with other reports; and anything
that happens only inside of one turn of a machine.
"""

from __future__ import annotations

from collections.abc import Callable

from pccl.protocol import messages as m
from pccl.protocol.peer import effects as ps
from pccl.types import Result
from tests.simulation.checks.conduct import Conduct
from tests.simulation.checks.facts import Facts, IsLinked, Leader
from tests.simulation.checks.group_calls import GroupCalls
from tests.simulation.checks.takeover import Takeovers
from tests.simulation.checks.testimony import Testimony
from tests.simulation.checks.verdicts import Verdicts
from tests.simulation.checks.views import Leaders, Rest, Views, check_ring, speaks
from tests.simulation.connections import Control
from tests.simulation.node import Key, Node

__all__ = ["Checks", "check_ring"]


class Checks:
    def __init__(
        self,
        nodes: list[Node],
        addresses: int,
        is_one_name: bool,
        is_fenced: bool,
        now: Callable[[], float] = lambda: 0.0,
        founders: int = 1,
    ) -> None:
        """`is_fenced`: there is one master at a time, and it keeps on disk what it did. `now` tells the time."""
        self._facts = Facts(nodes, addresses, is_one_name)
        self._leaders = Leaders(self._facts, is_fenced)
        self._views = Views(self._facts)
        self._verdicts = Verdicts(self._facts)
        self._calls = GroupCalls(self._facts)
        self._rest = Rest(self._facts, self._verdicts)
        self._testimony = Testimony(self._facts)
        self._takeovers = Takeovers(self._facts, is_fenced)
        self._conduct = Conduct(self._facts, now, founders)
        self.absent, self.strangers = self._conduct.absent, self._conduct.strangers
        self._taking_over: Leader | None = None
        """The master that is just taking a run over."""
        self._accepted: list[Node] = []
        """The peers that the master whose turn it is led before its turn, except for those that it has let go of."""
        self._results: list[tuple[Node, m.GroupCallResult]] = []
        """The group call results of this turn."""
        self.installed = self._views.installed
        self.agreement = self._verdicts.agreement
        self.says = self._testimony.says
        self.has_heard = self._testimony.turn_ends
        self.finds_done = self._testimony.finds_done
        self.call_ends = self._testimony.call_ends

    # Masters.

    def turn_begins(self, process: int) -> None:
        """Note that a master is about to say what one event has led to."""
        self._conduct.turn_begins()
        self._takeovers.turn_begins(process)
        self._accepted = [
            node
            for node in self._facts.nodes
            if node.is_accepted and node.is_known and node.leader is not None and node.leader.process == process
        ]

    def turn_ends(self, is_whole: bool) -> None:
        """Check what a master has said in its turn. `is_whole`: it was not stopped before it had said all."""
        self._conduct.turn_ends(is_whole)
        self._takeovers.turn_ends(is_whole)
        if self._taking_over is not None:
            leader, self._taking_over = self._taking_over, None
            self._accepted = [node for node, _ in leader.followers if node.is_accepted and node.is_known]
            self._verdicts.failed_over(leader)
            self._calls.failed_over(leader)
        if self._results:
            results, self._results = self._results, []
            by = results[0][0].leader
            if by is not None:
                self._calls.results(by, results, self._accepted, is_whole)

    def sent(self, control: Control, process: int, message: m.Message, company: list[Node]) -> None:
        """Note what a master sends over a connection. `company` are the peers that are connected to it."""
        node = control.node
        self._takeovers.says(control, process, message)
        if control is not node.control:  # it has come again over another connection, and is unknown here
            if isinstance(message, m.GroupCallResult):
                self._accepted = [each for each in self._accepted if each is not node]
            return
        speaks(node, process, message)
        if node.leader is not None:
            self._leaders.numbers(node.leader, message)
        if isinstance(message, m.Welcome | m.Resumed):
            self.absent.discard(node)
        if isinstance(message, m.Welcome):
            self._welcome(node, control, process, message)
        elif isinstance(message, m.Resumed):
            self._resumed(node, control, process, message)
        elif isinstance(message, m.Install):
            node.is_accepted = True
            self._views.puts_in_force(message)
        elif isinstance(message, m.Prepare):
            self._facts.prepare(node.leader, message)
        elif isinstance(message, m.Flush):
            self._verdicts.flush(node, process, message)
        elif isinstance(message, m.SyncPlan):
            self._calls.planned(node, message)
        elif isinstance(message, m.VoteRequest):
            self._leaders.asks(node, self._takeovers.told_of(process, node.run), company)
        elif isinstance(message, m.GroupCallResult):
            self._results.append((node, message))
            # A peer that the master lets go of after that, as when it is deposed by a further loss, has its result.
            self._accepted = [each for each in self._accepted if each.is_known]
        self._conduct.says(node, process, message)

    def _welcome(self, node: Node, control: Control, process: int, message: m.Welcome) -> None:
        node.former_numbers.append(node.number)
        node.number = message.peer
        node.is_accepted = False
        leader, _ = self._facts.led(node, control, process, message.run, message.term)
        self._leaders.leads(node, leader)

    def _resumed(self, node: Node, control: Control, process: int, message: m.Resumed) -> None:
        leader, is_new = self._facts.led(node, control, process, node.run, message.term)
        self._conduct.resumed(node, process)
        self._leaders.takes_on(node, leader)
        self._facts.has_failed_over = True
        if is_new and not self._facts.is_one_name:
            for other in self._facts.nodes:
                if other is not node and other.run == node.run:
                    other.is_known = False
        self._taking_over = leader

    def received(self, control: Control, process: int, message: m.Message) -> None:
        """Note what a master hears over a connection."""
        node = control.node
        self._takeovers.received(control, process, message)
        if isinstance(message, m.Vote):
            self._conduct.reported(node, process, message.report)
        if control is not node.led_over:
            return  # it has come again over another connection, or has yet to be led over this one
        self._conduct.received(node, process, message)
        if isinstance(message, m.FlushReply):
            self._verdicts.replied(node, process, message)
        elif isinstance(message, m.GroupCall) and message.offer is not None:
            self._calls.offered(node, process, message.offer)

    def gone(self, control: Control) -> None:
        """Note that a connection is over at a master: it has lost its peer, evicted it or let it go."""
        self.absent.discard(control.node)
        self._takeovers.gone(control)
        if control is control.node.led_over:
            control.node.is_known = False
            self._verdicts.note_survivors()

    # Peers.

    def heard(self, node: Node, message: m.Message) -> None:
        """Note what a peer hears."""
        self._testimony.heard(node, message)
        if isinstance(message, m.Prepare):
            node.prepared_epoch = next(
                (ring.epoch for ring in message.rings if node.number in ring.peers), node.prepared_epoch
            )
        elif isinstance(message, m.StartOver):
            node.prepared_epoch = None
        elif isinstance(message, m.Install):
            node.prepared_epoch = None
            before = self._facts.listed[node.views[-1].view] if node.views else set()
            if self._facts.listed.get(message.view, set()) - before:
                # It reports calls that ended without a message to this peer only where it admits a peer.
                node.call_heard = max(node.call_heard, message.call_number)
        elif isinstance(message, m.GroupCallResult):
            node.call_heard = max(node.call_heard, message.call_number)

    def op_result(self, node: Node, effect: ps.OpResult, end: ps.Ended | None) -> None:
        """Check a result that a caller hears. `end` is the end of the session where that comes at once with it."""
        if effect.code is Result.SUCCESS and effect.op in node.keys:
            self._testimony.succeeds(node, node.keys[effect.op])
        self._verdicts.result(node, effect, end)

    def commit(self, node: Node, key: Key) -> None:
        """Check an op that a peer commits."""
        self._verdicts.commit(node, key)

    # At rest.

    def rest(self, accepted: list[Node], is_linked: IsLinked, may_ops_wait: bool) -> None:
        self._rest.check(accepted, is_linked, may_ops_wait)
        self._takeovers.rest(accepted)

    @property
    def verdicts(self) -> dict[Key, dict[str, Result]]:
        """Every op's verdicts, by the name of the peer that heard them."""
        return self._verdicts.heard
