"""Measuring links to other peers for the machine (`network.probe`)."""

from __future__ import annotations

import logging

import trio

from pccl.protocol import messages as m
from pccl.protocol import peer as ps
from pccl.runtime.network import probe
from pccl.runtime.session.driver import Driver, Handlers
from pccl.runtime.session.lifetime import Lifetime
from pccl.runtime.session.outbound import Outbound
from pccl.runtime.threads.tasks import start_task


class Measuring:
    """Measurements that the machine asks for. Only for the trio thread."""

    def __init__(
        self,
        driver: Driver,
        lifetime: Lifetime,
        outbound: Outbound,
        logger: logging.LoggerAdapter[logging.Logger],
    ) -> None:
        self._driver = driver
        self._outbound = outbound
        self._logger = logger
        self.handlers: Handlers = {ps.RunProbe: lambda _, effect: lifetime.spawn(self._probe, effect)}

    async def _probe(self, effect: ps.RunProbe) -> None:
        facts = self._driver.facts
        found: list[m.LinkMetric] = []

        async def one(link: ps.ProbedLink) -> None:
            pulls = link.is_inbound
            hello = m.ProbeHello(m.PROTOCOL_VERSION, facts.run, facts.peer, link.member.peer, pulls)

            async def dial() -> trio.socket.SocketType:
                return (await self._outbound.dial(link.member, hello, facts.peer_timeout_s))[0]

            try:
                metric = await probe.measure(dial, link.connections, pulls)
            except probe.ProbeError as error:
                way = "from" if pulls else "to"
                self._logger.info("cannot measure the link %s peer %d: %s", way, link.member.peer, error)
            else:
                round_trip_us = round(metric.round_trip_s * 1e6)
                found.append(m.LinkMetric(link.member.peer, pulls, metric.bytes_per_s, round_trip_us))

        async with trio.open_nursery() as nursery:
            for link in effect.links:
                start_task(nursery, one, link)
        with self._driver.taking_over as machine:
            machine.probed(effect.probe, found, trio.current_time())
