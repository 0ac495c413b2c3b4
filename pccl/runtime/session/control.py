"""The control connection of a session, and the search for another master when the current one is lost.

A broken control connection is restored to the same master and continues the session (`codec.ControlSession`) without
the machine noticing. The master is lost

1. if it does not know the session;
2. if reconnecting fails for a peer timeout, or for half of `master_timeout_s` if that is shorter;
3. immediately, if its port is closed, its heartbeats have ended, and there are other masters to try.

The peer then searches for another master at all addresses in turn (`MasterAddresses`), while the engine continues. A
peer that finds none within `master_timeout_s` gives up.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable

import trio

from pccl._version import __version__
from pccl.protocol import messages as m
from pccl.protocol.auth import AuthError
from pccl.protocol.codec import KEY_BYTES, ControlSession, ProtocolError
from pccl.protocol.peer import effects as ps
from pccl.protocol.peer.machine import Peer
from pccl.protocol.status import RunStatus
from pccl.protocol.wait_reasons import explain_wait
from pccl.runtime.network import addresses, handshake
from pccl.runtime.network.addresses import DIAL_S, LEAD_TIMEOUTS, Address, MasterAddresses
from pccl.runtime.network.clients import NoAnswer, ask
from pccl.runtime.network.heartbeat import SharedHeartbeats, keep_heartbeats
from pccl.runtime.network.tls import TlsEnd, TlsError
from pccl.runtime.network.wire import ConnectionLost, ControlConnection, NoMasterError, SocketChannel, dial_control
from pccl.runtime.session.driver import Part, Shared
from pccl.runtime.session.recorder import RecordingParts

WELCOME_TIMEOUT_S = 10.0
RETRY_S = 1.0
"""The pause after the heartbeat thread could not start."""
REATTACH_SHARE = 0.5
"""Time limit for restoring a broken control connection, as a share of the master timeout."""
REATTACH_PAUSE_S_MIN = 0.02
"""The first pause between two attempts to restore a control connection."""
REATTACH_PAUSE_S_MAX = 0.5

_jitter = random.SystemRandom()
"""A separate random source, because the program may have seeded the global one."""


class Control(Part):
    """The control connection and the search for masters."""

    def __init__(
        self,
        shared: Shared,
        masters: MasterAddresses,
        heartbeats: Heartbeats,
        recording_parts: RecordingParts,
        seek_s: float,
    ) -> None:
        """`masters` includes the connected master's address. A newcomer spends at least `seek_s`
        searching for a master that leads a run."""
        super().__init__(shared)
        self.attached = trio.Event()
        """Set while there is a control connection, as far as this peer knows."""
        self.attached.set()
        self.is_cut_off = False
        """Whether the last connection to a master broke before the master answered the opening."""
        self.answered = trio.Event()
        """Set when a master has answered or the session has ended."""
        self.senders: trio.Nursery | None = None
        """Holds the sending tasks, which outlive all others in order to send final messages."""
        self._masters = masters
        self._heartbeats = heartbeats
        self._recording_parts = recording_parts
        self._seek_s = seek_s
        self._attending = trio.CancelScope()
        """The scope of the current control connection's task."""
        self._patience: trio.CancelScope | None = None
        """The cancel scope of the search for a master, with the end of the search as its deadline. It is cancelled when
        a master accepts this peer."""
        self._search_end = 0.0
        """The end of the search, unless a master with a majority of the peers has extended it."""
        self._heard = trio.Event()
        self.handlers = {ps.SeekMaster: self._seek_master}
        self._lifetime.at_end(lambda _: self.answered.set())

    def account(self) -> str:
        """Return a description of how the last attempt at each master failed; empty if no attempt has ended."""
        return self._masters.failures()

    async def until_master_speaks(self) -> None:
        """Wait for the next messages from a master, or for its loss."""
        await self._heard.wait()

    async def follow_masters(self) -> None:
        """Communicate with one master after another until the session is over."""
        while True:
            self._attending = trio.CancelScope()
            self._start_sender()
            with self._attending:
                await self._attend()
            if self._driver.facts.is_over:
                return
            await self._master.end()
            await self._find_master()

    def _start_sender(self) -> None:
        assert self.senders is not None
        self._lifetime.start(self.senders, self._master.connection.run_sender)

    # One master.

    async def _attend(self) -> None:
        """Pass a master's messages to the machine until the connection ends or the machine no longer needs it."""
        driver, facts = self._driver, self._driver.facts
        session = ControlSession(secrets.token_bytes(KEY_BYTES))
        with driver.taking_over as machine:
            resume = self._resume(machine, session.key)
        if resume is not None:  # a long wait without messages may follow
            self._master.connection.bound_silence(facts.peer_timeout_s)
        opening = resume or self._hello(session.key)
        patience_s = WELCOME_TIMEOUT_S
        messages: list[m.MasterMessage] | None = None
        while not facts.is_over and not self._attending.cancel_called:
            reason, is_breach = "", False
            self.is_cut_off = False
            try:
                with trio.move_on_after(patience_s) as scope:
                    if messages is None:
                        messages = [await self._open(opening, session)]
                        self.answered.set()
                    else:
                        messages = await self._master.connection.receive()
                if scope.cancelled_caught:
                    reason = f"it does not lead a run yet, after {patience_s:g} s"
                    if messages is None:
                        reason = f"no answer within {patience_s:g} s; is there a pccl master at this address?"
            except ConnectionLost as error:
                reason = f"lost the master: {error}"
                if facts.is_led:
                    failure = await self._reattach(session, str(error))
                    if not failure:
                        messages = []
                        self.answered.set()
                        continue
                    reason = f"{reason}; {failure}"
                self.is_cut_off = messages is None and not error.is_of_tls
            except NoMasterError as error:
                reason = str(error)
            except TlsError as error:
                reason = f"no TLS with the master: {error}"
            except AuthError as error:
                reason = f"the master was not accepted: {error}"
            except ProtocolError as error:
                reason, is_breach = str(error), True
            with driver.taking_over as machine:
                if not reason and messages is not None:
                    try:
                        reason = self._deliver(machine, messages)
                    except ProtocolError as error:
                        reason, is_breach = str(error), True
                if reason:
                    self._lose(machine, reason, is_breach)
                patience_s = self._patience_with(messages)
                self._heard.set()
                self._heard = trio.Event()

    def _deliver(self, machine: Peer, messages: list[m.MasterMessage]) -> str:
        """Pass the messages to the machine. Return why the master is unusable, or "". Raises ProtocolError."""
        for message in messages:
            if isinstance(message, m.RecordingRequest):
                self._recording_parts.asked(message)
                continue
            if isinstance(message, m.Goodbye) and not (machine.run or self._masters.are_all_asked_again):
                return f"refused: {message.reason}"
            machine.received(message)
            if isinstance(message, m.StartOver):
                # Ask all masters again, because earlier refusals do not show that no master leads a run.
                self._masters = self._masters.restarted()
            if isinstance(message, m.Elsewhere | m.StartOver | m.Goodbye):
                refused = "refused: " if isinstance(message, m.Goodbye) else ""
                self._masters.failed(self._master.address, f"{refused}{message.reason}")
                break
        return ""

    def _lose(self, machine: Peer, reason: str, is_breach: bool) -> None:
        """Notify the machine that this master is lost or unusable."""
        if is_breach:
            reason = f"the master violates the protocol: {reason}"
            if machine.is_led and machine.run:
                machine.give_up(reason)
        self._masters.failed(self._master.address, reason)
        if not machine.run and self._masters.are_all_asked and self._patience is None:
            machine.give_up(reason)
        else:
            machine.master_lost(reason)

    def _patience_with(self, messages: list[m.MasterMessage] | None) -> float:
        """Return how long to wait for a master's next messages after these."""
        if not messages or not isinstance(messages[-1], m.PreVoteRequest | m.VoteRequest):
            return float("inf")
        timeout_s = self._driver.facts.peer_timeout_s
        is_majority_there = isinstance(messages[-1], m.VoteRequest)
        if is_majority_there and self._patience is not None and trio.current_time() < self._search_end:
            # The master may wait a peer timeout for the remaining peers. Stay, even if the search has little time left,
            # but only once: without a record, the master waits for all peers, and one of them may never come back.
            self._patience.deadline = max(self._patience.deadline, trio.current_time() + LEAD_TIMEOUTS * timeout_s)
        return self._masters.patience_s(timeout_s, is_majority_there)

    def _resume(self, machine: Peer, session: bytes) -> m.Resume | None:
        now, options = trio.current_time(), self._options
        return machine.resume(len(self._masters.addresses), now, session, options.master_timeout_s, options.run_name)

    def _hello(self, session: bytes) -> m.Hello:
        options = self._options
        return m.Hello(
            m.PROTOCOL_VERSION,
            __version__,
            options.group,
            list(options.hosts),
            options.port or self._listen_port,
            options.connections,
            options.name,
            site=options.site,
            site_size=options.site_size,
            masters=len(self._masters.addresses),
            may_found=self._masters.are_all_asked,
            session=session,
            master_timeout_s=options.master_timeout_s,
            place=options.place,
            run_name=options.run_name,
        )

    async def _open(self, opening: m.Hello | m.Resume, session: ControlSession) -> m.MasterMessage:
        """Send the opening and return the answer. A peer in a run accepts a refusal only if the master has proved that
        it knows the token."""
        options, connection = self._options, self._master.connection
        if options.ssl_context is not None:
            await connection.start_tls(TlsEnd(options.ssl_context, self._master.name))
        connection.session = session
        dialled = await handshake.dial_keyed(connection, options.token, None, opening, m.MasterMessage)
        answer: m.MasterMessage = dialled.answer
        if isinstance(opening, m.Resume) and isinstance(answer, m.Goodbye) and options.token and not dialled.is_proven:
            raise AuthError(answer.reason)
        connection.trust()
        connection.note_delivery()
        return answer

    def welcomed(self, timeout_s: float) -> None:
        """Record that a master has accepted this peer into a run with this peer timeout."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._master.connection.bound_silence(timeout_s)
        self._heartbeats.begin((self._master.host, self._master.port), timeout_s)

    # Reconnecting to the same master.

    async def _reattach(self, session: ControlSession, reason: str) -> str:
        """Continue the session over another connection to the same master. Return "", or the reason for a failure."""
        self._logger.info("the control connection was lost: %s; restoring it", reason)
        self.attached = trio.Event()
        self._master.connection.shutdown()
        self._master.connection.close()
        facts = self._driver.facts
        limit_s = min(facts.peer_timeout_s or DIAL_S, REATTACH_SHARE * self._options.master_timeout_s)
        pause_s = REATTACH_PAUSE_S_MIN
        failure = f"no other connection within {limit_s:g} s"
        try:
            with trio.move_on_after(limit_s):
                while True:
                    try:
                        self._master.connection = await self._dial_again(session)
                        self._start_sender()
                        self._logger.info("the control connection has been restored")
                        return ""
                    except ConnectionLost as error:
                        failure = f"no other connection within {limit_s:g} s: {error}"
                        has_choice = not facts.run or len(self._masters.addresses) > 1
                        if error.is_refused and not self._heartbeats.is_connected and has_choice:
                            return str(error)
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, REATTACH_PAUSE_S_MAX)
        except (TlsError, AuthError, ProtocolError) as error:
            failure = f"it does not continue with this peer: {error}"
        finally:
            self.attached.set()
        return failure

    async def _dial_again(self, session: ControlSession) -> ControlConnection[m.MasterMessage]:
        """Return a connection that continues the session. Raises ConnectionLost, or another error if the master does
        not know the session."""
        options, facts = self._options, self._driver.facts
        master = self._master
        connection = await dial_control(master.host, master.port, m.MasterMessage, options.system.dial, DIAL_S)
        try:
            if facts.run:
                connection.bound_silence(facts.peer_timeout_s)
            if options.ssl_context is not None:
                await connection.start_tls(TlsEnd(options.ssl_context, self._master.name))
            opening = m.Reattach(m.PROTOCOL_VERSION, session.key, session.received)
            answer = await handshake.dial(connection, options.token, facts.run or None, opening, m.ReattachAnswer)
            if not isinstance(answer, m.Reattached):
                raise ProtocolError(answer.reason)
            connection.trust()
            connection.continue_session(session, answer.received)
        except BaseException:
            connection.close()
            raise
        return connection

    # Finding another master.

    def _seek_master(self, _: Peer, effect: ps.SeekMaster) -> None:
        self._attending.cancel()
        self._heartbeats.stop()
        if self._patience is None:
            limit_s = self._options.master_timeout_s
            if not self._driver.facts.run:
                limit_s = max(limit_s, self._seek_s)
            self._search_end = trio.current_time() + limit_s
            self._patience = trio.CancelScope(deadline=self._search_end)
            self._masters = self._masters.restarted()
            self._lifetime.spawn(self._be_patient, self._patience, effect.reason, limit_s)

    async def _be_patient(self, patience: trio.CancelScope, reason: str, limit_s: float) -> None:
        with patience:
            await trio.sleep_forever()
        if trio.current_time() >= patience.deadline:
            with self._driver.taking_over as machine:
                tried = self._masters.failures()
                machine.give_up(
                    f"{reason}; no master has taken over within {limit_s:g} s. "
                    f"{f'Tried {tried}' if tried else 'No attempt ended in that time'}"
                    f"{self._haste(limit_s)}"
                )
                self._attending.cancel()

    def _haste(self, limit_s: float) -> str:
        timeout_s = self._driver.facts.peer_timeout_s
        if limit_s >= timeout_s:
            return ""
        return (
            f". master_timeout is less than the run's peer_timeout of {timeout_s:g} s, which peers need to detect that "
            f"their master is silent; increase it for runs that must outlive masters"
        )

    async def _find_master(self) -> None:
        """Try the masters in turn until one accepts a connection."""
        while True:
            attempt = self._masters.next(_jitter.random())
            await trio.sleep(attempt.pause_s)
            try:
                dial = self._options.system.dial
                connection = await dial_control(*attempt.address, m.MasterMessage, dial, DIAL_S)
                break
            except ConnectionLost as error:
                self._masters.failed(attempt.address, str(error))
                self._logger.debug("no master at %s: %s", addresses.join(*attempt.address), error)
        self._master.met_at(connection, attempt.address)


class Heartbeats(Part):
    """The heartbeats between this peer and its master."""

    def __init__(self, shared: Shared) -> None:
        super().__init__(shared)
        self.is_connected = False
        """Whether there is a heartbeat connection."""
        self._scope = trio.CancelScope()
        self._shared: SharedHeartbeats | None = None

    def begin(self, master: Address, timeout_s: float) -> None:
        """Exchange heartbeats with a master that has accepted this peer; stop those with any other."""
        self._scope.cancel()
        self._scope = trio.CancelScope()
        self._lifetime.spawn(self._send, master, timeout_s, self._scope)

    def stop(self) -> None:
        self._scope.cancel()

    def forget_after_fork(self) -> None:
        if self._shared is not None:
            self._shared.forget_after_fork()

    async def _send(self, master: Address, timeout_s: float, scope: trio.CancelScope) -> None:
        hello = m.HeartbeatHello(m.PROTOCOL_VERSION, self._driver.facts.run, self._driver.facts.peer)

        async def connect() -> trio.socket.SocketType:
            self.is_connected = False
            if self._lifetime.ended.is_set():
                await trio.sleep_forever()  # the session is over, so a closed connection is expected
            sock = await self._dial(master, hello)
            self.is_connected = True
            return sock

        with scope:
            try:
                with SharedHeartbeats.of_run(self._options.system.heartbeats, timeout_s) as self._shared:
                    reason = await keep_heartbeats(self._shared, connect, timeout_s)
            except OSError as error:  # the next attempt, soon, may have what this one lacks
                reason = f"cannot be sent heartbeats: {error}"
                await trio.sleep(RETRY_S)
            with self._driver.taking_over as machine:
                machine.master_lost(f"the master at {addresses.join(*master)} {reason}")

    async def _dial(self, master: Address, hello: m.HeartbeatHello) -> trio.socket.SocketType:
        """Return a connection to the master at this numeric address that has accepted `hello`.
        Raises ConnectionLost."""
        system = self._options.system
        try:
            sock = system.stream(await system.dial(*master))
        except OSError as error:
            raise ConnectionLost(error.strerror or str(error)) from None
        try:
            channel = SocketChannel(sock)
            answer = await handshake.dial(channel, self._options.token, hello.run, hello, m.HeartbeatAnswer)
            if not isinstance(answer, m.Accepted):
                raise ConnectionLost(f"refused: {answer.reason}")
            return sock
        except ProtocolError as error:
            sock.close()
            raise ConnectionLost(str(error)) from None
        except BaseException:
            sock.close()
            raise


ASKERS = 64
"""Average number of peers in a large run that query the master at the same time."""
ASK_S = 2.0


class CallReasons(Part):
    """Asks the master what group calls wait for. Only for the trio thread.

    In a large run all peers wait for the same call. Each asks with a probability that makes about ASKERS of them ask.
    """

    def __init__(self, shared: Shared, control: Control, world_size: Callable[[], int]) -> None:
        super().__init__(shared)
        self._control = control
        self._world_size = world_size

    async def of_call(self, kind: str) -> str:
        """Return what a group call of this kind waits for."""
        status = await self._status()
        return explain_wait(status, self._driver.facts.peer, kind) if isinstance(status, RunStatus) else status

    async def of_admission(self) -> str:
        """Return what this newcomer waits for."""
        return await self.of_call("")

    async def of_hold(self) -> str | None:
        """Return what the master that holds this newcomer waits for, or None if it does not answer."""
        status = await self._status()
        return status.held_for if isinstance(status, RunStatus) else None

    async def _status(self) -> RunStatus | str:
        """Return the run's status, or a wait reason that is known without it."""
        is_led = self._driver.facts.is_led
        tried = self._control.account()
        lost = f"a master, because the last one is lost{f' (tried {tried})' if tried else ''}"
        if _jitter.random() * self._world_size() > ASKERS:
            return "other peers, which have not called it" if is_led else lost
        options, where = self._options, addresses.join(*self._master.address)
        try:
            with trio.fail_after(ASK_S):
                status = await ask(*self._master.address, options.token, options.ssl_context, options.system.dial)
            return status if is_led else f"the run's master ({status.recovery})" if status.recovery else lost
        except (NoAnswer, trio.TooSlowError) as error:
            if not is_led:
                return lost
            why = str(error) or f"no answer within {ASK_S:g} s"
            return f"other peers, or their master at {where}, which does not answer: {why}"
