"""Newcomers find masters before the peers of a run are back, or in their place. One run must not become two."""

from __future__ import annotations

from pccl.protocol import messages as m
from pccl.protocol.failover.bootstrap import BIRTH_MARGIN_S, END_TIMEOUTS, HOLD_S
from tests.simulation.master_host import Memory
from tests.simulation.node import Node
from tests.simulation.scene import MASTER_TIMEOUT_S
from tests.simulation.trials.base import MARGIN_S, SEARCH_TIMEOUTS, Trial

FLAP_S = 1.0
"""Seconds for which a peer is there that goes again."""


class Newcomers(Trial):
    """All masters have ended and begin anew, and newcomers are there before the peers: those go on all the same."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        n, run = len(peers), peers[0].run
        safe_s = self._timeout_s + BIRTH_MARGIN_S  # a master without a record lets nobody found a run for so long
        if self._is_recorded:
            safe_s = END_TIMEOUTS * self._timeout_s
        count = min(rng.randint(1, n + 1), world.options.pending_max)
        if self._is_recorded and count < n:
            safe_s = MASTER_TIMEOUT_S  # it knows of more peers than those that have come
        away_s = rng.choice((0.2, 0.6, 0.85)) * safe_s / self._slack**2
        for host in world.hosts:
            if not host.is_dead:
                world.kill_master(host)
        flapping = rng.random() < 0.5
        stays = flapping and not self._is_recorded and n > 2 and rng.random() < 0.5
        if stays:
            # While one of them is here nobody founds a run, however long the others take.
            away_s = rng.choice((0.85, 2.0, 4.0)) * safe_s / self._slack**2
        for node in peers:
            self._cut_off(node, away_s)
        if flapping and away_s > 2 * FLAP_S:
            back_s = min(away_s - 2 * FLAP_S, 0.8 * safe_s / self._slack**2)
            self._heals_at[peers[0]] = world.now + rng.uniform(0.3, 0.9) * back_s
        self._drain()
        for host in world.hosts:
            world.restart_master(host)
        newcomers = [world.add(rng.randrange(self._groups)) for _ in range(count)]
        end_at = world.now + away_s
        was_back = False
        while world.now < end_at:
            self._let_time_pass()
            assert not any(node.views for node in newcomers), f"{newcomers} found a run, and there is one"
            if flapping and not stays and not was_back and peers[0] not in self._heals_at:
                was_back = True
                self._pass(FLAP_S)
                if not any(host.is_leading for host in world.hosts):
                    # It goes again, and is waited for as the others are.
                    for host in world.hosts:
                        world.block(host.name, peers[0])
                    world.sever(peers[0])
                    self._drain()
                    end_at = max(end_at, world.now + 0.7 * self._timeout_s / self._slack**2)
                    for node in peers:
                        self._cut_off(node, end_at - world.now)
        for node in peers:
            self._heals_at.setdefault(node, world.now)
        bound_s = 2 * MARGIN_S + (SEARCH_TIMEOUTS + 2) * self._timeout_s
        self._all_are_led(peers, run, bound_s * self._slack)
        self._be_whole()
        for node in newcomers:
            assert node.run == run, f"{node} is in {node.run}, and the others are in {run}"


class Heirs(Trial):
    """All of a run have died, and its masters with them: newcomers found another one, within the time that is told."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        n = len(peers)
        if max(n + 1, world.checks.largest_view) > world.options.pending_max:
            return
        for host in world.hosts:
            if not host.is_dead:
                world.kill_master(host)
        for node in peers:
            world.kill(node)
        self._drain()
        for host in world.hosts:
            world.restart_master(host)
        is_recorded = world.memory is Memory.DISK
        count = rng.randint(n, n + 1) if is_recorded else rng.randint(1, n + 1)
        count = max(count, world.options.founders)
        if is_recorded and world.addresses > 1:
            count = max(count, world.checks.largest_view)  # one of them may know of an earlier view only
        newcomers: list[Node] = [world.add(rng.randrange(self._groups)) for _ in range(count)]
        bound_s = self._timeout_s + BIRTH_MARGIN_S
        if is_recorded:
            bound_s = END_TIMEOUTS * self._timeout_s
        end_at = world.now + (bound_s + HOLD_S + MARGIN_S) * self._slack
        while not world.accepted:
            assert world.now <= end_at, f"{newcomers} found no run, and all of the one before have died"
            self._let_time_pass()
        self._be_whole()


class _BackLate(Trial):
    """Peers are back when newcomers have been at their master for a while. Those wait, and are in the same run."""

    def _begin_without(self, peers: list[Node]) -> None:
        """All masters begin anew, and these reach none of them."""
        world = self._world
        for host in world.hosts:
            if not host.is_dead:
                world.kill_master(host)
        for node in peers:
            self._cut_off(node, MASTER_TIMEOUT_S)
        self._drain()
        for host in world.hosts:
            world.restart_master(host)

    def _are_held(self, newcomers: list[Node], seconds: float) -> None:
        """For so long nobody founds a run."""
        end_at = self._world.now + seconds
        while self._world.now < end_at:
            self._let_time_pass()
            assert not any(node.views for node in newcomers), f"{newcomers} found a run, and there is one"

    def _all_are_in(self, peers: list[Node], newcomers: list[Node], run: str) -> None:
        for node in peers:
            self._heals_at.setdefault(node, self._world.now)
        bound_s = 2 * MARGIN_S + (SEARCH_TIMEOUTS + 2) * self._timeout_s
        self._all_are_led(peers, run, bound_s * self._slack)
        self._be_whole()
        for node in newcomers:
            assert node.run == run, f"{node} is in {node.run}, and the others are in {run}"


class Unseated(_BackLate):
    """A master stands still, and so leads no further. It may die when it has asked its peers to follow, and begin anew
    with its record. Newcomers are there before the peers: the run is not over."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        n, run, host = len(peers), peers[0].run, world.hosts[0]
        if not host.is_leading:
            return  # another one may take what it has not heard of for no run at all
        dies = self._is_recorded and rng.random() < 0.7
        count = min(rng.randint(1, n - 1) if dies else rng.randint(1, n), world.options.pending_max)
        safe_s = min(2 * self._timeout_s, self._timeout_s + BIRTH_MARGIN_S)
        if dies:
            safe_s = MASTER_TIMEOUT_S / 2  # fewer come than its record names
        away_s = rng.choice((0.4, 0.6, 0.85)) * safe_s / self._slack**2
        if not dies:
            for node in peers:
                self._cut_off(node, MASTER_TIMEOUT_S)
        world.freeze_master(host)
        self._pass(0.8 * self._timeout_s)
        world.thaw_master(host)
        if dies:
            self._until_said(m.VoteRequest)
            world.kill_master(host)
            for node in peers:
                self._cut_off(node, MASTER_TIMEOUT_S)
            self._drain()
            world.restart_master(host)
        assert not host.is_leading, "a master stood still, and leads on"
        newcomers = [world.add(rng.randrange(self._groups)) for _ in range(count)]
        self._are_held(newcomers, away_s)
        self._heals_at = dict.fromkeys(peers, world.now)
        self._all_are_in(peers, newcomers, run)


class OneIsBack(_BackLate):
    """A master begins anew with its record, and as many newcomers come as there were peers. One of these is back before
    the run would be taken for over, the rest after that: all go on."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        n, run, host = len(peers), peers[0].run, world.hosts[0]
        if not self._is_recorded or not 2 <= n < world.options.pending_max:
            return
        world.kill_master(host)
        for node in peers:
            self._cut_off(node, MASTER_TIMEOUT_S)
        self._drain()
        world.restart_master(host)
        newcomers = [world.add(rng.randrange(self._groups)) for _ in range(rng.randint(n, n + 1))]
        ends_s = END_TIMEOUTS * self._timeout_s
        self._heals_at[peers[0]] = world.now + ends_s * rng.uniform(0.7, 0.88)
        self._are_held(newcomers, ends_s * rng.uniform(1.15, 1.3))
        self._heals_at = dict.fromkeys(peers, world.now)
        self._all_are_in(peers, newcomers, run)


class LedElsewhere(_BackLate):
    """Newcomers have asked all masters and wait at the first one, which has begun anew. Then peers of a run reach
    another master, and this one does not hear of them: the newcomers ask once more before they found a run."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        run, first = peers[0].run, world.hosts[0]
        if world.addresses == 1 or world.memory is Memory.DISK or any(node.site for node in peers):
            return  # what is on record would have the newcomers wait for longer
        self._begin_without(peers)
        count = min(world.options.founders + rng.randint(0, 2), world.options.pending_max)
        newcomers = [world.add(rng.randrange(self._groups)) for _ in range(count)]
        safe_s = (self._timeout_s + BIRTH_MARGIN_S) / self._slack**2
        self._are_held(newcomers, rng.uniform(0.1, 0.5) * safe_s)
        self._heals_at.clear()
        world.heal()
        for node in peers:
            world.cut(node, first.name)
        self._drain()
        self._pass((safe_s + HOLD_S + MARGIN_S) * self._slack**2)
        for node in newcomers:
            assert node.run in (run, ""), f"{node} is in {node.run}, and {peers} are in {run}"
        world.heal()
        self._all_are_in(peers, newcomers, run)


class NewDisk(_BackLate):
    """A master begins anew with a disk on which there is no record. Newcomers that know several masters wait there for
    peers of a run that another one may have led."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        run = peers[0].run
        if world.addresses == 1 or world.memory is not Memory.DISK or any(node.site for node in peers):
            return
        for host in world.hosts:
            if not host.is_dead:
                world.kill_master(host)
            host.record = None
        for node in peers:
            self._cut_off(node, MASTER_TIMEOUT_S)
        self._drain()
        for host in world.hosts:
            world.restart_master(host)
        count = min(rng.randint(1, 2) + world.options.founders, world.options.pending_max)
        newcomers = [world.add(rng.randrange(self._groups)) for _ in range(count)]
        self._are_held(newcomers, rng.choice((0.3, 0.85)) * (self._timeout_s + BIRTH_MARGIN_S) / self._slack**2)
        self._heals_at = dict.fromkeys(peers, world.now)
        self._all_are_in(peers, newcomers, run)


class TooFew(_BackLate):
    """Too few newcomers to found a run wait for others at a master that has begun anew, when peers of a run come late:
    the newcomers give way to them, and join them."""

    def play(self) -> None:
        world, rng = self._world, self._rng
        peers = world.accepted
        run, founders = peers[0].run, world.options.founders
        if not world.masters or founders < 2 or world.memory is Memory.DISK or any(node.site for node in peers):
            return
        self._begin_without(peers)
        newcomers = [world.add(rng.randrange(self._groups)) for _ in range(rng.randint(1, founders - 1))]
        waits_s = (self._timeout_s + BIRTH_MARGIN_S + HOLD_S + MARGIN_S) * self._slack
        self._are_held(newcomers, min(waits_s, MASTER_TIMEOUT_S / 2))
        self._heals_at = dict.fromkeys(peers, world.now)
        self._all_are_in(peers, newcomers, run)
