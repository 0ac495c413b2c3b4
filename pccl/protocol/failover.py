"""Failover: a master process that leads a run, or waits for peers that have lost the master of theirs.

A run must be led by one master at a time, and go on when that one dies. As in Raft, peers of a dead master are first
asked what they know without promising anything (pre-vote), then asked for their votes in a higher term; whoever has a
majority of the last view leads. As in Viewstamped Replication, those who vote send what the next leader needs to know.

Events and effects are those of a master's machine (`master.machine`), which does all the leading; this one replaces it
when leadership begins or ends. It is

    vacant      it leads no run. Peers may found one (Hello), or bring one along (Resume)
    leading     all is passed on to the `Master`

Gathering. A peer that has lost its master says Resume, and which views it knows when it is asked (PreVoteRequest,
PreVote). As soon as a majority of the run's last view has come, so far as those who are here know of it, they are asked
to follow in a term higher than any that has been heard of (VoteRequest), and answer with their recovery report (Vote);
from then on they follow no lower term. When a majority does, and all of the view or enough time has passed since it was
complete and since somebody came or followed last (of which GATHER_TIMEOUTS bounds the sum), the run is rebuilt
(`recovery_report`, `recovery`) and led: one who has waited here for longer, because it alone was cut off from the last
master, hurries nobody, and nobody is late because this master is busy with thousands of others. Until then nobody is
evicted: there is nobody to do it. What one says costs the same however many are here (`summary_tally`).

How long is enough depends on who else can have led the run on:

    several addresses   `peer_timeout_s`: nobody has, for want of a majority
    one, and a fence    `peer_timeout_s`: whom the last master had left out is known (`fence`)
    one, and no fence   as long as those who are here have patience, less a `peer_timeout_s`: of the others some may
                        have gone on without those who are here, so all of them are waited for. `resumes_any` says that
                        no such wait is wanted

So nobody is bound to a term that no majority has made: a few who are cut off from a master that leads gather elsewhere
without leaving its term, and when they come back they have nothing that it would have to give way to.

Founding. Newcomers may found a run only when no other can come back: see `founding`. A peer of a run never joins
another: it waits for its own until its patience ends.

Deposition. A master lets go of all its peers, and they, and it, begin to gather again, when it may have been given up:

    1  it hears no heartbeat of most of a view at once, or their connections were closed and none came back
       (`Master.deposed`). It is rather its own network that is out. So nobody is evicted, and whoever has gone on
       meanwhile reports. Where all connections were closed, as when all processes have ended, others may soon found
       a run: who lives dials again and again, and comes as soon as newcomers do
    2  it hears of a higher term of its run from one of its own peers
    3  it stood still for so long that its peers may have given it up (`stood_still`)

A higher term of which it hears from anybody else is none that it must give way to: as long as it has a majority of the
view in force, nobody else has, and if another had gone on with a majority, this one would have lost it. Whoever says so
was put out of the run.

Where peers know of this address only, nobody else has led the run since, and this process knows who was in it: it has
led it, or has the record of one that did. So it goes on without a majority too, with those who have been here for
`DOUBT_TIMEOUTS`: the others are dead, or cut off from these as well. If nobody has come, and as many newcomers are here
as peers are missing, the run is over after `END_TIMEOUTS`, and another one may be founded.

At most one leads at a time: see `recovery_report`. A peer follows one in a term.

Where peers know one master only, that one leads on whomever it loses. If it dies, some whom it had lost may be all of
the last view that they know of. A successor without a fence waits for others as long as it can. If none of those whom
it led to the end come by then, or those are dead, the lost go on from where they were, perhaps in the term in which
another has led the others, who are told that they are evicted. No peer goes on with both, and what is said by one that
was stopped meanwhile must mean nothing to those that the other leads: so two leaders number peers and views apart, even
in one term (`recovery.block`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.fence import Fence, bounded_s
from pccl.protocol.founding import BIRTH_MARGIN_S, Founding
from pccl.protocol.gathering import Claim, Gathering
from pccl.protocol.known_runs import KnownRuns
from pccl.protocol.master.effects import Close, Effect, MasterLog, Persist, Send
from pccl.protocol.master.machine import Master
from pccl.protocol.master.options import MasterOptions
from pccl.protocol.master.run_state import RunState
from pccl.protocol.recovery import Survivor, take_over
from pccl.protocol.recovery_report import is_sound, rebuild
from pccl.types import Result

STANDSTILL_SHARE = 0.5
"""Of the peer timeout: a master that stood still for less is not missed by its peers."""
DEPOSED_TIMEOUTS = 2.0
"""For so many peer timeouts one that was deposed lets nobody found a run, where peers may follow another master."""


class Failover:
    def __init__(
        self,
        run: str,
        options: MasterOptions | None = None,
        birth_at: float = 0.0,
        is_standby: bool = False,
        secret: bytes = b"",
        fence: Fence | None = None,
        persists: bool = False,
        resumes_any: bool = False,
    ) -> None:
        """`run` is the name of one that may be founded here, and `secret` what only its masters and peers know. `fence`
        is what a process before this one has left; with `persists`, this one is told what to leave (Persist)."""
        self.options = options or MasterOptions()
        self._known = KnownRuns(fence)
        self._persists = persists
        self._resumes_any = resumes_any
        self._secret = secret
        self.master = Master(RunState(run, self.options, secret=secret))
        self.is_standby = is_standby
        self.others = ""
        """What is known of other masters, for those who are sent away."""
        self._founding = Founding(self.options.peer_timeout_s, birth_at)
        self._names = run
        self._claims: dict[int, Claim] = {}
        self._gatherings: dict[str, Gathering] = {}
        """By run."""
        self._now = 0.0
        self._effects: list[Effect] = []
        self._depositions = 0

    # Events.

    def begin(self, now: float, hold_s: float) -> list[Effect]:
        """The process starts. For `hold_s` nobody may found a run."""
        self._now = now
        self._founding.wait(now, hold_s)
        if self._known.fence is not None and not self._known.fence.is_over and not self.is_standby:
            self._log("info", f"waits for {self._whom_it_waits_for()}")
        return self._drain()

    def connected(self, connection: int, host: str, now: float) -> list[Effect]:
        self._now = now
        if len(self._claims) + len(self._founding) >= self.options.connections_max:
            self._dismiss(connection, m.Elsewhere("this master has too many connections"))
        else:
            self._effects += self.master.connected(connection, host, now)
        return self._drain()

    def received(self, connection: int, message: m.FromPeer, now: float) -> list[Effect]:
        self._now = now
        host = self.master.host_of(connection)
        if connection in self._claims:
            self._claimant_said(self._claims[connection], message)
        elif connection in self._founding:
            self._release(connection)
            self._dismiss(connection, m.Goodbye(Result.INVALID_USAGE, f"unexpected {type(message).__name__}"))
        elif host is not None and isinstance(message, m.Resume):
            # The master has known this connection as one that had said nothing.
            self._effects += self.master.disconnected(connection, "it has a run", now)
            self._resume(connection, host, message)
        elif host is not None and isinstance(message, m.Hello) and not self.is_leading:
            self._hello(connection, host, message)
        else:
            self._effects += self.master.received(connection, message, now)
            self._check_deposition()
        return self._drain()

    def disconnected(self, connection: int, reason: str, now: float) -> list[Effect]:
        self._now = now
        if not self._release(connection):
            self._effects += self.master.disconnected(connection, reason, now)
            self._check_deposition()
        return self._drain()

    def detached(self, connection: int, reason: str, now: float) -> list[Effect]:
        self._now = now
        if self._release(connection):
            self._effects.append(Close(connection))
        else:
            self._effects += self.master.detached(connection, reason, now)
            self._check_deposition()
        return self._drain()

    def reattached(self, connection: int, now: float) -> list[Effect]:
        self._now = now
        self._effects += self.master.reattached(connection, now)
        self._check_deposition()
        return self._drain()

    def note_quiet(self, connections: Iterable[int]) -> None:
        """As of Master."""
        self.master.note_quiet(connections)

    def silent(self, connection: int, silent_s: float, now: float) -> list[Effect]:
        self._now = now
        self._effects += self.master.silent(connection, silent_s, now)
        self._check_deposition()
        return self._drain()

    def rings_found(self, search: int, rings: Mapping[int, Sequence[int]], now: float) -> list[Effect]:
        self._now = now
        self._effects += self.master.rings_found(search, rings, now)
        self._check_deposition()
        return self._drain()

    def stood_still(self, seconds: float, now: float) -> list[Effect]:
        """This process could do nothing for so long. To be called before any other event after that."""
        self._now = now
        if self.is_leading and seconds >= STANDSTILL_SHARE * self.options.peer_timeout_s:
            self._depose(f"it stood still for {seconds:.1f} s")
        return self._drain()

    def tick(self, now: float) -> list[Effect]:
        self._now = now
        self._effects += self.master.tick(now)
        self._check_deposition()
        self._consider_all()
        if self._send_away():
            self._consider_all()
        self._found()
        self._send_away_held()
        return self._drain()

    def deadline(self) -> float | None:
        times = self._founding.deadlines(self._known.fence, is_missed=not self._claims)
        for gathering in self._gatherings.values():
            times += gathering.deadlines(self._now, self._known.is_fenced(gathering))
        deadline = self.master.deadline()
        return min([*times, deadline] if deadline is not None else times, default=None)

    @property
    def is_leading(self) -> bool:
        return not self.master.is_vacant

    @property
    def run(self) -> str:
        return self.master.run

    @property
    def birth_at(self) -> float:
        """When newcomers may found a run here, unless peers of one come first."""
        return self._founding.birth_at

    # Peers without a master.

    def _resume(self, connection: int, host: str, message: m.Resume) -> None:
        who = f"peer {message.peer} of run {message.run!r}"
        if message.protocol != m.PROTOCOL_VERSION:
            text = f"this master speaks protocol {m.PROTOCOL_VERSION}, the peer {message.protocol}"
            self._dismiss(connection, m.Goodbye(Result.MASTER_CONNECTION_FAILED, text))
            return
        ended = self._founding.ended
        if ended is not None and ended.run == message.run and message.term <= ended.term and message.masters == 1:
            text = f"evicted: run {message.run!r} is over, since none of its peers came for long; connect again"
            self._dismiss(connection, m.Goodbye(Result.MASTER_CONNECTION_FAILED, text, ended.secret))
            return
        if self.is_leading and message.run != self.run and not message.is_accepted:
            self._dismiss(connection, m.StartOver(f"it leads run {self.run!r} and not {message.run!r}"))
            return
        if self.is_leading and message.run != self.run:
            self._dismiss(connection, m.Elsewhere(f"it leads run {self.run!r} and not {message.run!r}"))
            return
        if self.is_leading and message.term > self.master.term and self.master.is_accepted(message.peer):
            self._depose(f"{who} has followed another master, in term {message.term}")
        elif self._is_missed_by(message) and self.master.has_lost_sight(but_of=message.peer):
            self._depose(f"{who} has lost it, and most of the others send no heartbeat either")
        old = self.master.connection_of(message.peer)
        if self.is_leading and old is not None:
            self._effects.append(Close(old))
            self._effects += self.master.disconnected(old, "its connection was lost on its side", self._now)
            self._check_deposition()
        if self.is_leading and not message.is_accepted:
            self._dismiss(connection, m.StartOver("the run has gone on without the view that was to accept it"))
            return
        if self.is_leading:
            text = f"evicted: run {message.run!r} has gone on without peer {message.peer}, whose connection was lost"
            self._put_out(connection, text)
            return
        if message.run == self.run and (
            message.term < self.master.term
            or (message.term == self.master.term and message.peer in self.master.leadership.evicted)
        ):
            # This master has led the run, up to the end of it, and not lost it: without this peer, if that follows
            # a lower term.
            text = f"evicted: run {message.run!r} has ended without peer {message.peer}; connect again"
            self._put_out(connection, text)
            return
        refusal = self._known.refusal(message, is_waiting=self._founding.is_waiting(self._now))
        if refusal is not None:
            self._dismiss(connection, refusal)
            return
        before = self._gatherings.get(message.run)
        if before is not None and message.peer in before.claims:
            former = before.claims[message.peer].connection
            self._release(former)
            self._dismiss(former, m.Elsewhere("this peer has come again"))
        self._log("info", f"{who} ({host}) has lost its master")
        master_timeout_s = bounded_s(message.master_timeout_s, m.MASTER_TIMEOUT_S)
        claim = self._claims[connection] = Claim(
            connection,
            host,
            message.peer,
            message.run,
            message.term,
            message.masters,
            message.is_accepted,
            self._now,
            master_timeout_s,
            self._now + bounded_s(message.patience_s, master_timeout_s),
        )
        self._say(connection, m.PreVoteRequest())
        known = self._known.fence.term if self._known.fence is not None and self._known.fence.run == message.run else 0
        gathering = self._gatherings.get(message.run)
        if gathering is None:
            term = max(message.term, known) + 1
            gathering = Gathering(message.run, term, self.options.peer_timeout_s, self._resumes_any)
            self._gatherings[message.run] = gathering
        gathering.enter(claim)
        self._known.bound(gathering)
        if gathering.term <= message.term:
            gathering.raise_term(message.term + 1)
            self._ask(message.run)

    def _is_missed_by(self, message: m.Resume) -> bool:
        """One of those whom this master leads has lost it."""
        return self.is_leading and message.term == self.master.term and self.master.is_accepted(message.peer)

    def _claimant_said(self, claim: Claim, message: m.FromPeer) -> None:
        if isinstance(message, m.Leave):
            self._release(claim.connection)
            self._effects.append(Close(claim.connection))
        elif isinstance(message, m.PreVote | m.Vote):
            summary = message.report if isinstance(message, m.Vote) else message
            if isinstance(message, m.Vote) and message.term != claim.asked:
                return  # it has been asked for a higher one since
            gathering = self._gatherings[claim.run]
            summary = gathering.here.views.shared(summary)
            if not is_sound(claim.peer, summary, gathering.here.views):
                self._release(claim.connection)
                text = f"peer {claim.peer} reports what cannot be"
                self._dismiss(claim.connection, m.Goodbye(Result.INVALID_USAGE, text))
                return
            self._known.note_view(gathering, summary.installed)
            is_following = isinstance(message, m.Vote) and message.term == gathering.term
            gathering.said(claim, summary, is_following, self._now)
            if isinstance(message, m.Vote):
                self._consider(claim.run)
            else:
                self._ask(claim.run)
        # else: said before it heard that its master was lost

    def _consider_all(self) -> None:
        for run in list(self._gatherings):
            if run in self._gatherings:
                self._ask(run)
            if run in self._gatherings:
                self._consider(run)

    def _is_over(self, since: float) -> bool:
        """So has a peer timeout that began then."""
        return self._now >= since + self.options.peer_timeout_s

    def _ask(self, run: str) -> None:
        """Asks those who have come to follow, if they are a majority."""
        gathering = self._gatherings[run]
        here = gathering.quorum(gathering.needs_majority(self._now, self._known.is_fenced(gathering)))
        if not here.peers and self._is_over(gathering.since):
            self._start_over(run, gathering)
            return
        if not here.has_majority:
            gathering.majority_at = None
        else:
            self._note_term(run, gathering)
            gathering.majority_at = self._now if gathering.majority_at is None else gathering.majority_at
            for claim in gathering.to_ask():
                claim.asked = gathering.term
                self._say(claim.connection, m.VoteRequest(claim.asked))
        if gathering.tells_at is not None and self._now >= gathering.tells_at:
            gathering.tells_at = None
            self._log("info", gathering.account(here, self._now, self._known.is_fenced(gathering)))

    def _start_over(self, run: str, gathering: Gathering) -> None:
        """Nobody here was ever accepted, so there is nothing to go on with."""
        gathering.tells_at = None
        fence = self._known.fence_of(gathering)
        if fence is not None and fence.installed is None and fence.newest.peers <= gathering.here.heard:
            self._remember(msgspec.structs.replace(fence, prepared=[], is_over=True))
            self._founding.allow(self._now)
        for claim in list(gathering.claims.values()):
            if claim.peer in gathering.here.heard:
                self._release(claim.connection)
                self._dismiss(claim.connection, m.StartOver("nobody who was accepted has come"))

    def _note_term(self, run: str, gathering: Gathering) -> None:
        """Peers are about to be asked to follow in it."""
        fence = self._known.fence_of(gathering)
        if fence is not None and fence.term < gathering.term:
            self._remember(msgspec.structs.replace(fence, term=gathering.term))
            self._known.bound(gathering)

    def _remember(self, fence: Fence) -> None:
        self._known.fence = fence
        if self._persists:
            self._effects.append(Persist(fence))

    def _consider(self, run: str) -> None:
        """Leads the run if it may."""
        gathering = self._gatherings[run]
        majority_at, is_fenced = gathering.majority_at, self._known.is_fenced(gathering)
        needs_majority = gathering.needs_majority(self._now, is_fenced)
        if majority_at is None or not gathering.may_lead(needs_majority):
            return
        if gathering.is_enough(needs_majority) or self._now >= gathering.leads_at(majority_at, is_fenced):
            self._lead(run)

    def _lead(self, run: str) -> None:
        gathering = self._gatherings[run]
        needs_majority = gathering.needs_majority(self._now, self._known.is_fenced(gathering))
        recovered = rebuild(gathering.following, gathering.has_rivals, gathering.fence, needs_majority)
        survivors = {
            peer: Survivor(claim.connection, claim.host, claim.masters, claim.since, claim.master_timeout_s)
            for peer, claim in gathering.claims.items()
            if peer in recovered.members
        }
        unidentified = self.master.unidentified
        name = f"{self._names}-{self._depositions}"
        self.master = take_over(run, gathering.term, self.options, recovered, survivors, self._now, name)
        self._gatherings.clear()
        self._known.forget(run)
        self._founding.allow(self._now)
        for claim in list(self._claims.values()):
            self._release(claim.connection)
            if claim.run == run and claim.peer in recovered.members:
                continue
            if claim.run != run:
                self._dismiss(claim.connection, m.Elsewhere(f"it leads run {run!r} and not {claim.run!r}"))
            elif claim.peer in recovered.newcomers or not claim.is_accepted:
                self._dismiss(claim.connection, m.StartOver("the view that was to accept it has never been"))
            else:
                text = f"evicted: lost before view {recovered.view_heard}, or too late to report after the loss of "
                self._put_out(claim.connection, f"{text}the master; connect again")
        for connection, host in unidentified.items():
            self._effects += self.master.connected(connection, host, self._now)
        self._effects += self.master.tick(self._now)
        self._release_held()

    def _check_deposition(self) -> None:
        if self.master.deposed:
            self._depose(self.master.deposed)

    def _depose(self, reason: str) -> None:
        """Leads no further."""
        old = self.master
        self._log("warning", f"run {old.run} is led no further by this master: {reason}")
        self._effects += old.abdicate(f"it leads no further: {reason}")
        self._depositions += 1
        self._known.fence = old.fence()
        if old.leadership.has_rivals or self._known.fence.installed is None:  # it may be led elsewhere
            hold_s = DEPOSED_TIMEOUTS * self.options.peer_timeout_s
        elif old.is_deserted:
            hold_s = self.options.peer_timeout_s + BIRTH_MARGIN_S
        else:
            # Its peers may look for a master for so long.
            hold_s = self._known.fence.master_timeout_s + self.options.peer_timeout_s
        self._founding.wait(self._now, hold_s)
        name = f"{self._names}-{self._depositions}"
        self.master = Master(RunState(name, self.options, secret=self._secret))
        for connection, host in old.unidentified.items():
            self._effects += self.master.connected(connection, host, self._now)

    def _send_away(self) -> bool:
        """Who waits for long comes again if it lives: nothing else would tell. Whether there was one."""
        late: list[Claim] = []
        for gathering in self._gatherings.values():
            for claim in gathering.claims.values():
                if self._now < gathering.stays_until(claim.since, self._known.is_fenced(gathering)):
                    break
                late.append(claim)
        for claim in late:
            self._release(claim.connection)
            self._dismiss(claim.connection, m.Elsewhere(f"of run {claim.run!r} too few peers have come to this master"))
        return bool(late)

    # Newcomers.

    def _hello(self, connection: int, host: str, message: m.Hello) -> None:
        if self._claims or (self._founding.is_waiting(self._now) and message.may_found and not self.is_standby):
            self._founding.hold(connection, host, message, self._now)
            who = f"a newcomer from {host} is held: this master waits for {self._whom_it_waits_for()}"
            self._effects.append(MasterLog("info", who, is_unauthenticated=True))
            self._effects += self.master.disconnected(connection, "it is held", self._now)
        elif self.is_standby:
            self._effects += self.master.disconnected(connection, "it is sent away", self._now)
            self._dismiss(
                connection, m.Elsewhere(f"a standby, which leads no run{'; ' * bool(self.others)}{self.others}")
            )
        elif not message.may_found:
            self._effects += self.master.disconnected(connection, "it is sent away", self._now)
            self._dismiss(connection, m.Elsewhere("it leads no run yet"))
        else:
            self._effects += self.master.received(connection, message, self._now)
            self._check_deposition()

    def _found(self) -> None:
        """Let those who wait found a run, unless peers of one are here."""
        if not self._claims and self._founding.may_found(self._known.fence, self._now):
            self._release_held()

    def _send_away_held(self) -> None:
        """Send those who have waited for long to another master. They may come again."""
        for connection in self._founding.overdue(self._now):
            self._dismiss(connection, m.Elsewhere(f"it waits for {self._whom_it_waits_for()}"))

    def _whom_it_waits_for(self) -> str:
        if self._gatherings:
            runs = ", ".join(f"{run!r} ({each.quorum()})" for run, each in self._gatherings.items())
            return f"the peers of run {runs}"
        return self._founding.whom_it_waits_for(self._known.fence, self._now)

    def _release_held(self) -> None:
        for connection, (host, hello) in self._founding.take_all().items():
            self._effects += self.master.connected(connection, host, self._now)
            if self.is_leading:
                self._effects += self.master.received(connection, hello, self._now)
            else:
                self._hello(connection, host, hello)

    def _release(self, connection: int) -> bool:
        """Lets go of who waits here. False if it does not."""
        if self._founding.discard(connection):
            return True
        claim = self._claims.pop(connection, None)
        if claim is None:
            return False
        gathering = self._gatherings.get(claim.run)
        if gathering is not None:
            gathering.leave(claim)
            if not gathering.claims:
                del self._gatherings[claim.run]
            elif not gathering.quorum().has_majority:
                gathering.majority_at = None
        if not self._claims:
            self._founding.peers_have_left(self._now)
        return True

    # Small helpers.

    def _say(self, connection: int, message: m.FromMaster) -> None:
        self._effects.append(Send(connection, message))

    def _dismiss(self, connection: int, message: m.FromMaster) -> None:
        self._say(connection, message)
        self._effects.append(Close(connection))

    def _put_out(self, connection: int, reason: str) -> None:
        """A peer of the run that this master leads, or has led to its end, is in it no more."""
        self._dismiss(connection, m.Goodbye(Result.MASTER_CONNECTION_FAILED, reason, self.master.secret))

    def _log(self, level: str, text: str) -> None:
        self._effects.append(MasterLog(level, text))
        self.master.state.history.logged(self._now, level, text)

    def _drain(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        for effect in effects:
            if isinstance(effect, Persist) and effect.fence is not self._known.fence:
                self._known.fence = effect.fence
        return effects if self._persists else [each for each in effects if not isinstance(each, Persist)]
