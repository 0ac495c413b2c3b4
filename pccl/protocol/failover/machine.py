"""The state machine of a master process, which leads a run or waits for peers that have lost their master.

One master at a time leads a run, but the run outlives it. As in Raft, peers that lost their master first report what
they know (pre-vote), then vote in a higher term, and a master with a majority of the last view leads. As in Viewstamped
Replication, a vote contains what the next leader must know. `master.machine.Master` leads the run; this machine
replaces that object when leadership starts or ends.

How a run continues:

    1  A peer without a master sends Resume, and answers PreVoteRequest with the views that it knows.
    2  The master asks a majority of the last view for votes in a higher term (VoteRequest). A peer follows one master
       per term, so at most one master leads in a term. If the majority breaks up and other masters exist, its
       peers get PreVoteRequest again, and the next majority votes in a higher term.
    3  The master rebuilds and leads the run (`recovery`) once all peers of the view have voted or, if some do not, one
       `peer_timeout` after the last arrival, but no later than GATHER_TIMEOUTS. No peer is evicted before that.
    4  With one master address, evicted peers could outvote those that continued. A record of the run identifies the
       peers that continued, and after DOUBT_TIMEOUTS no majority is needed, because missing peers are dead or cut off.
       Without a record, the run continues only with all peers of its newest known view.

A master stops leading in any of these cases. It then closes its connections, and its peers gather again.

    5  The heartbeats of most peers of the view stopped or their connections closed at the same time (`Master.deposed`):
       the master is probably cut off. If all connections closed, as when all processes end, a new run may start soon.
    6  One of its own peers reports a higher term. Other peers do not count, because they were evicted.
    7  Its process was suspended for too long (`stood_still`), unless no view of its run was ever installed.

A peer that is not accepted yet starts over. It does so immediately at the master of its run, and elsewhere after a
peer timeout in which none of the run's peers knew an installed view.

When a peer returns to a master that has lost it:

    8  Once a view without the peer is installed (`Leadership.is_final_without`), the peer is evicted. Until then it is
       sent to other masters, because the next master may need it for its majority.

Only a Goodbye with the run's secret evicts a peer. After Elsewhere the peer tries another master; after StartOver it
sends Hello as a newcomer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

import msgspec

from pccl.protocol import messages as m
from pccl.protocol.failover.bootstrap import BIRTH_MARGIN_S, Bootstrap
from pccl.protocol.failover.durable_state import RunRecord
from pccl.protocol.failover.gathering import Gathering, KnownRuns
from pccl.protocol.failover.recovery import RecoveringPeer, is_sound, rebuild, take_over
from pccl.protocol.master.machine import Master, kicked_out
from pccl.protocol.master.run_state import Close, Effect, MasterLog, MasterOptions, Persist, RunState, Send
from pccl.protocol.names import peers_named, run_mismatch
from pccl.types import Result

STANDSTILL_SHARE = 0.5
"""Share of the peer timeout that a master's process may be suspended before it stops leading."""
DEPOSED_TIMEOUTS = 2.0
"""After being deposed, start no run for this many peer timeouts: peers may have moved to another master."""


class Failover:
    def __init__(
        self,
        run: str,
        options: MasterOptions | None = None,
        is_standby: bool = False,
        secret: bytes = b"",
        record: RunRecord | None = None,
        persists: bool = False,
    ) -> None:
        """`run` is the name for a run that starts here, and `secret` is shared by its masters and peers. `record` is
        from an earlier process. Persist effects are returned only if `persists`."""
        self.options = options or MasterOptions()
        self._known = KnownRuns(record)
        self._persists = persists
        self._secret = secret
        self.master = Master(RunState(run, self.options, secret=secret))
        self.is_standby = is_standby
        self.others = ""
        self._bootstrap = Bootstrap(self.options.peer_timeout_s)
        self._names = run
        self._survivors: dict[int, RecoveringPeer] = {}
        self._gatherings: dict[str, Gathering] = {}
        self._now = 0.0
        self._effects: list[Effect] = []
        self._depositions = 0

    # Events.

    def begin(self, now: float, hold_s: float, hold_beside_s: float = 0.0) -> list[Effect]:
        self._now = now
        self._bootstrap.wait(now, hold_s, hold_beside_s)
        if self._known.record is not None and not self._known.record.is_over and not self.is_standby:
            self._log("warning", f"waits for {self._awaited_peers(now)}")
        return self._drain()

    def connected(self, connection: int, host: str, now: float) -> list[Effect]:
        self._now = now
        if len(self._survivors) + len(self._bootstrap) >= self.options.connections_max:
            self._dismiss(connection, m.Elsewhere("this master has too many connections"))
        else:
            self._effects += self.master.connected(connection, host, now)
        return self._drain()

    def received(self, connection: int, message: m.FromPeer, now: float) -> list[Effect]:
        self._now = now
        host = self.master.admission.host_of(connection)
        if connection in self._survivors:
            self._on_survivor(self._survivors[connection], message)
        elif connection in self._bootstrap:
            self._release(connection)
            self._dismiss(
                connection,
                m.Goodbye(Result.INVALID_USAGE, f"unexpected {type(message).__name__} from a newcomer that waits"),
            )
        elif host is not None and isinstance(message, m.Resume):
            # The leading master has received no message on this connection.
            self._effects += self.master.disconnected(connection, "it has a run", now)
            self._resume(connection, host, message)
        elif host is not None and isinstance(message, m.Hello):
            self._newcomer(connection, host, message)
        else:
            self._effects += self.master.received(connection, message, now)
            self._check_leadership()
        return self._drain()

    def disconnected(self, connection: int, reason: str, now: float) -> list[Effect]:
        self._now = now
        if self._release(connection):
            return self._drain()
        return self._follow(self.master.disconnected(connection, reason, now), now)

    def detached(self, connection: int, reason: str, now: float) -> list[Effect]:
        self._now = now
        if self._release(connection):
            self._effects.append(Close(connection))
            return self._drain()
        return self._follow(self.master.detached(connection, reason, now), now)

    def reattached(self, connection: int, now: float) -> list[Effect]:
        return self._follow(self.master.reattached(connection, now), now)

    def note_quiet(self, connections: Iterable[int]) -> None:
        """Record the connections without a heartbeat for `liveness.QUIET_SHARE` of the peer timeout. Called before each
        event that may be a loss."""
        self.master.liveness.note_quiet(connections)

    def silent(self, connection: int, silent_s: float, now: float) -> list[Effect]:
        return self._follow(self.master.silent(connection, silent_s, now), now)

    def name_stragglers(self, silent: Mapping[int, float], now: float) -> list[Effect]:
        return self.master.name_stragglers(silent, now) if self.is_leading else []

    def kick(self, peer: int, now: float) -> list[Effect]:
        """Remove this peer of the run that this master leads."""
        return self._follow(self.master.kick(peer, now), now)

    def rings_found(self, search: int, rings: Mapping[int, Sequence[int]], now: float) -> list[Effect]:
        return self._follow(self.master.rings_found(search, rings, now), now)

    def stood_still(self, seconds: float, now: float) -> list[Effect]:
        """Handle a suspension of this process. Called before any later event."""
        self._now = now
        is_long = seconds >= STANDSTILL_SHARE * self.options.peer_timeout_s
        if self.is_leading and is_long and self.master.leadership.has_begun:
            self._depose(f"its process was suspended for {seconds:.1f} s")
        return self._drain()

    def tick(self, now: float) -> list[Effect]:
        self._now = now
        self._effects += self.master.tick(now)
        self._check_leadership()
        self._consider_all()
        if self._send_away():
            self._consider_all()
        self._found()
        self._send_away_held()
        return self._drain()

    def deadline(self) -> float | None:
        times = self._bootstrap.deadlines(self._known.record, is_missed=not self._survivors)
        for gathering in self._gatherings.values():
            times += gathering.deadlines(self._now)
        deadline = self.master.deadline()
        return min([*times, deadline] if deadline is not None else times, default=None)

    @property
    def is_leading(self) -> bool:
        return not self.master.is_vacant

    @property
    def run(self) -> str:
        return self.master.state.run

    def holding(self, now: float) -> tuple[int, str]:
        is_waiting = self._survivors or (self._bootstrap.is_waiting(now) and not (self.is_standby or self.is_leading))
        return len(self._bootstrap), self._awaited_peers(now) if is_waiting else ""

    def recovery(self, now: float) -> str:
        """Describe the peers of a run that have returned to this master, and the remaining wait for the others. Return
        "" if it waits for none."""
        record = self._known.record
        if self.is_leading:
            return ""
        if self._gatherings:
            progress = next(iter(self._gatherings.values())).progress(now)
        elif record is not None and record.newest.peers and not record.is_over and self._bootstrap.is_waiting(now):
            peers = peers_named(sorted(record.newest.peers), lambda peer: record.names.get(peer, ""))
            left_s = self._bootstrap.birth_at - now
            left = f", {left_s:.0f} s left" if left_s < inf else ""
            progress = f"0 of {len(record.newest.peers)} peers are back; waiting for {peers}{left}"
        else:
            return ""
        cause = "standby takes over" if self.is_standby else "master restarted"
        return f"{'master lost most peers' if self._depositions else cause}; {progress}"

    # Peers without a master.

    def _resume(self, connection: int, host: str, message: m.Resume) -> None:
        name = f"peer {message.peer} of run {message.run!r}"
        if message.protocol != m.PROTOCOL_VERSION:
            spoken = f"this master speaks protocol {m.PROTOCOL_VERSION}, the peer {message.protocol}"
            text = f"{spoken}; install the same version of pccl on both"
            self._dismiss(connection, m.Goodbye(Result.MASTER_CONNECTION_FAILED, text))
            return
        mismatch = run_mismatch(self.options.run_name, message.run_name)
        rejection: m.FromMaster | None = m.Elsewhere(mismatch) if mismatch else self._bootstrap.refusal(message)
        if rejection is None and self.is_leading and self._resume_while_leading(connection, message, name):
            return
        is_waiting = self._bootstrap.is_waiting(self._now)
        rejection = rejection or left_out(self.master, message) or self._known.refusal(message, is_waiting)
        if rejection is not None:
            self._dismiss(connection, rejection)
            return
        self._log("info", f"{name} ({host}) has lost its master")
        self._wait_with_others(connection, host, message)

    def _resume_while_leading(self, connection: int, message: m.Resume, name: str) -> bool:
        """Handle Resume while leading. Return False if this master stopped leading, so the peer may wait here."""
        if message.run != self.run:
            if message.is_accepted and self.master.waits_for_founders:
                self._effects += self.master.dismiss_founders(f"peers of run {message.run!r} have connected")
            if self.is_leading:
                self._dismiss(connection, of_another_run(self.master, message))
            return self.is_leading
        state, liveness = self.master.state, self.master.liveness
        is_own = state.is_accepted(message.peer)
        if is_own and message.term > state.term:
            self._depose(f"{name} has followed another master in term {message.term}")
        elif is_own and message.term == state.term and liveness.has_lost_sight(but_of=message.peer):
            self._depose(f"{name} has lost this master, and most other peers send no heartbeats either")
        old = self.master.state.members.get(message.peer)
        if old is not None:
            self._effects.append(Close(old.connection))
            self._effects += self.master.disconnected(old.connection, "it lost its connection", self._now)
            self._check_leadership()
        if self.is_leading:
            self._dismiss(connection, lost(self.master, message))
        return self.is_leading

    def _wait_with_others(self, connection: int, host: str, message: m.Resume) -> None:
        before = self._gatherings.get(message.run)
        if before is not None and message.peer in before.survivors:
            former = before.survivors[message.peer].connection
            self._release(former)
            self._dismiss(former, m.Elsewhere("this peer has connected again"))
        survivor = self._survivors[connection] = RecoveringPeer(connection, host, message, self._now)
        self._send(connection, m.PreVoteRequest())
        gathering = self._gatherings.get(message.run)
        if gathering is None:
            record = self._known.record
            known = record.term if record is not None and record.run == message.run else 0
            gathering = Gathering(message.run, max(message.term, known) + 1, self.options.peer_timeout_s)
            self._gatherings[message.run] = gathering
        gathering.enter(survivor)
        gathering.unaccepted_since = self._known.unaccepted_since(message.run, self._now, self.options.peer_timeout_s)
        gathering.record = self._known.record_of(gathering)
        if gathering.term <= message.term:
            gathering.raise_term(message.term + 1)
            self._ask(message.run)

    def _on_survivor(self, survivor: RecoveringPeer, message: m.FromPeer) -> None:
        if isinstance(message, m.Leave):
            self._release(survivor.connection)
            self._effects.append(Close(survivor.connection))
        elif isinstance(message, m.PreVote | m.Vote):
            summary = message.report if isinstance(message, m.Vote) else message
            if isinstance(message, m.Vote) and message.term != survivor.asked:
                return  # since then a vote for a higher term has been requested
            gathering = self._gatherings[survivor.run]
            summary = gathering.here.views.shared(summary)
            if not is_sound(survivor.peer, summary, gathering.here.views):
                self._release(survivor.connection)
                text = f"the report of peer {survivor.peer} contradicts itself"
                self._dismiss(survivor.connection, m.Goodbye(Result.INVALID_USAGE, text))
                return
            if summary.installed is not None:
                self._known.forget(gathering.run)
                gathering.unaccepted_since = self._now
            is_following = isinstance(message, m.Vote) and message.term == gathering.term
            gathering.report(survivor, summary, is_following, self._now)
            if isinstance(message, m.Vote):
                self._consider(survivor.run)
            else:
                self._ask(survivor.run)
        # else: sent before the peer noticed the loss of its master

    def _consider_all(self) -> None:
        for run in list(self._gatherings):
            if run in self._gatherings:
                self._ask(run)
            if run in self._gatherings:
                self._consider(run)

    def _ask(self, run: str) -> None:
        gathering = self._gatherings[run]
        here = gathering.quorum(gathering.needs_majority(self._now))
        if not here.peers and self._now >= gathering.unaccepted_since + self.options.peer_timeout_s:
            self._start_over(run, gathering)
            return
        if not here.has_majority:
            self._lose_majority(gathering)
        else:
            self._note_term(run, gathering)
            gathering.majority_at = self._now if gathering.majority_at is None else gathering.majority_at
            for survivor in gathering.to_ask():
                survivor.asked = gathering.term
                self._send(survivor.connection, m.VoteRequest(survivor.asked))
        if gathering.logs_at is not None and self._now >= gathering.logs_at:
            gathering.logs_at = None
            self._log("info", f"run {run}: {gathering.progress(self._now)}")

    def _lose_majority(self, gathering: Gathering) -> None:
        if gathering.majority_at is not None and gathering.has_rivals:
            asked = [survivor for survivor in gathering.survivors.values() if survivor.asked == gathering.term]
            gathering.raise_term(gathering.term + 1)
            for survivor in asked:
                self._send(survivor.connection, m.PreVoteRequest())
        gathering.majority_at = None

    def _start_over(self, run: str, gathering: Gathering) -> None:
        gathering.logs_at = None
        record = gathering.record
        if record is not None and record.installed is None and record.newest.peers <= gathering.here.peers:
            self._remember(msgspec.structs.replace(record, prepared=[], is_over=True))
            self._bootstrap.allow(self._now)
        for survivor in list(gathering.survivors.values()):
            if survivor.peer in gathering.here.peers:
                self._release(survivor.connection)
                self._dismiss(survivor.connection, m.StartOver("no peer that has connected was ever accepted"))

    def _note_term(self, run: str, gathering: Gathering) -> None:
        record = gathering.record
        if record is not None and record.term < gathering.term:
            self._remember(msgspec.structs.replace(record, term=gathering.term))
            gathering.record = self._known.record_of(gathering)

    def _remember(self, record: RunRecord) -> None:
        self._known.record = record
        if self._persists:
            self._effects.append(Persist(record))

    def _consider(self, run: str) -> None:
        gathering = self._gatherings[run]
        majority_at = gathering.majority_at
        needs_majority = gathering.needs_majority(self._now)
        if majority_at is None or not gathering.may_lead(needs_majority):
            return
        if gathering.is_enough(needs_majority) or self._now >= gathering.leads_at(majority_at):
            self._lead(run)

    def _lead(self, run: str) -> None:
        gathering = self._gatherings[run]
        needs_majority = gathering.needs_majority(self._now)
        recovered = rebuild(gathering.following, gathering.has_rivals, gathering.record, needs_majority)
        survivors = {peer: survivor for peer, survivor in gathering.survivors.items() if peer in recovered.members}
        unidentified, name = self.master.admission.unidentified, f"{self._names}-{self._depositions}"
        names = gathering.record.names if gathering.record is not None else {}
        self.master = take_over(run, gathering.term, self.options, recovered, survivors, self._now, name, names)
        self._gatherings.clear()
        self._known.forget(run)
        self._bootstrap.allow(self._now)
        for survivor in list(self._survivors.values()):
            self._release(survivor.connection)
            if survivor.run == run and survivor.peer in recovered.members:
                continue
            if survivor.run != run:
                self._dismiss(survivor.connection, m.Elsewhere(f"it leads run {run!r}, not {survivor.run!r}"))
            elif survivor.peer in recovered.newcomers or not survivor.resume.is_accepted:
                self._dismiss(survivor.connection, m.StartOver("the view that was to accept it was never in force"))
            else:
                late = f"lost before view {recovered.known_view}, or reported too late after the loss of the master"
                self._dismiss(survivor.connection, put_out(self.master, f"{late}; connect again"))
        for connection, (host, _) in unidentified.items():
            self._effects += self.master.connected(connection, host, self._now)
        self._effects += self.master.tick(self._now)
        self._release_held()

    def _follow(self, effects: list[Effect], now: float) -> list[Effect]:
        """Return the effects of an event at the master, and of the resulting change of leadership, if any."""
        self._now = now
        self._effects += effects
        self._check_leadership()
        return self._drain()

    def _check_leadership(self) -> None:
        """Stop leading if the master was deposed, and dismiss first peers that wait at a standby."""
        if self.master.deposed:
            self._depose(self.master.deposed)
        elif self.is_standby and self.is_leading and self.master.waits_for_founders:
            text = f"run {self.run!r} has ended, and a standby starts none: ask the other masters"
            self._effects += self.master.dismiss_founders(text)

    def _depose(self, reason: str) -> None:
        old = self.master
        self._log("warning", f"this master no longer leads run {old.state.run}: {reason}")
        self._effects += old.abdicate(f"it no longer leads: {reason}")
        self._depositions += 1
        self._known.record = old.leadership.record()
        if old.leadership.has_rivals:  # another master may lead it
            hold_s = DEPOSED_TIMEOUTS * self.options.peer_timeout_s
        elif old.is_deserted:
            hold_s = self.options.peer_timeout_s + BIRTH_MARGIN_S
        else:
            # Its peers may search for a master until then.
            hold_s = self._known.record.master_timeout_s + self.options.peer_timeout_s
        self._bootstrap.wait(self._now, hold_s)
        name = f"{self._names}-{self._depositions}"
        self.master = Master(RunState(name, self.options, secret=self._secret))
        for connection, (host, _) in old.admission.unidentified.items():
            self._effects += self.master.connected(connection, host, self._now)

    def _send_away(self) -> bool:
        late: list[RecoveringPeer] = []
        for gathering in self._gatherings.values():
            for survivor in gathering.survivors.values():
                if self._now < gathering.stays_until(survivor.since):
                    break
                late.append(survivor)
        for survivor in late:
            self._release(survivor.connection)
            self._dismiss(
                survivor.connection, m.Elsewhere(f"too few peers of run {survivor.run!r} have connected to this master")
            )
        return bool(late)

    # Newcomers.

    def _newcomer(self, connection: int, host: str, message: m.Hello) -> None:
        if self.is_leading and (message.may_found or not self.master.waits_for_founders):
            self._effects += self.master.received(connection, message, self._now)
            self._check_leadership()
        else:
            self._hello(connection, host, message)

    def _hello(self, connection: int, host: str, message: m.Hello) -> None:
        """Handle Hello without a run to join: hold or dismiss the newcomer, or start a run."""
        self._bootstrap.note_masters(message.masters)
        if self._survivors or (self._bootstrap.is_waiting(self._now) and message.may_found and not self.is_standby):
            peers = self._awaited_peers(self._now)
            self._effects.append(self._bootstrap.hold(connection, host, message, self._now, peers))
            self._effects += self.master.disconnected(connection, "it is held", self._now)
        elif self.is_standby:
            self._effects += self.master.disconnected(connection, "it is sent away", self._now)
            text = f"a standby, which leads no run{'; ' * bool(self.others)}{self.others}"
            self._dismiss(connection, m.Elsewhere(text))
        elif not message.may_found:
            self._effects += self.master.disconnected(connection, "it is sent away", self._now)
            self._dismiss(connection, m.Elsewhere("it leads no run yet"))
        else:
            self._effects += self.master.received(connection, message, self._now)
            self._check_leadership()

    def _found(self) -> None:
        """Let held newcomers start a run, unless peers of one are here or other masters must be asked first."""
        if not self._survivors and self._bootstrap.try_to_found(self._known.record, self._now):
            for connection in self._bootstrap.take_those_with_others():
                self._dismiss(connection, m.Elsewhere("it leads no run, but another master may do so by now"))
            self._release_held()

    def _send_away_held(self) -> None:
        for connection in self._bootstrap.overdue(self._now):
            self._dismiss(connection, m.Elsewhere(f"it waits for {self._awaited_peers(self._now)}"))

    def _awaited_peers(self, now: float) -> str:
        if self._gatherings:
            runs = ", ".join(f"{run!r} ({each.quorum()})" for run, each in self._gatherings.items())
            return f"the peers of run {runs}"
        return self._bootstrap.awaited_peers(self._known.record, now)

    def _release_held(self) -> None:
        for connection, (host, hello) in self._bootstrap.take_all().items():
            self._effects += self.master.connected(connection, host, self._now)
            self._newcomer(connection, host, hello)

    def _release(self, connection: int) -> bool:
        """Forget a recovering peer or a held newcomer. Return False if the connection belongs to neither."""
        if self._bootstrap.discard(connection):
            return True
        survivor = self._survivors.pop(connection, None)
        if survivor is None:
            return False
        gathering = self._gatherings.get(survivor.run)
        if gathering is not None:
            gathering.leave(survivor)
            if not gathering.survivors:
                del self._gatherings[survivor.run]
            elif not gathering.quorum().has_majority:
                self._lose_majority(gathering)
        if not self._survivors:
            self._bootstrap.peers_have_left(self._now)
        return True

    def _send(self, connection: int, message: m.FromMaster) -> None:
        self._effects.append(Send(connection, message))

    def _dismiss(self, connection: int, message: m.FromMaster) -> None:
        self._send(connection, message)
        self._effects.append(Close(connection))

    def _log(self, level: str, text: str) -> None:
        self._effects.append(MasterLog(level, text))
        self.master.state.history.logged(self._now, level, text)

    def _drain(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        for effect in effects:
            if isinstance(effect, Persist) and effect.record is not self._known.record:
                self._known.record = effect.record
        return effects if self._persists else [each for each in effects if not isinstance(each, Persist)]


def of_another_run(master: Master, message: m.Resume) -> m.Elsewhere | m.StartOver:
    rejection = m.Elsewhere if message.is_accepted else m.StartOver
    return rejection(f"it leads run {master.state.run!r}, not {message.run!r}")


def lost(master: Master, message: m.Resume) -> m.Elsewhere | m.StartOver | m.Goodbye:
    """Return the rejection of a lost peer of the current run (rule 8)."""
    if message.peer in master.state.kicked:
        return kicked_out(master.state)
    if not message.is_accepted:
        return m.StartOver("the run has continued without the view that was to accept it")
    if not master.leadership.is_final_without(message.peer):
        return m.Elsewhere(f"no view without peer {message.peer} is in force yet")
    return put_out(master, f"run {message.run!r} has continued without peer {message.peer}, whose connection was lost")


def left_out(master: Master, message: m.Resume) -> m.StartOver | m.Goodbye | None:
    """Return the rejection of a peer whose run has ended under this master, or None if it has not."""
    term = master.state.term
    if message.run != master.state.run:
        return None
    if not message.is_accepted:
        return m.StartOver("the run has ended, and this peer was never accepted")
    if message.term < term or (message.term == term and message.peer in master.leadership.evicted):
        # A peer with a lower term was not in the run when it ended.
        return put_out(master, f"run {message.run!r} has ended without peer {message.peer}; connect again")
    return None


def put_out(master: Master, reason: str) -> m.Goodbye:
    return m.Goodbye(Result.MASTER_CONNECTION_FAILED, f"evicted: {reason}", master.state.secret)
