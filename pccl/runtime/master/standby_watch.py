"""Watches the other masters of a standby by requesting their status.

The result is only logged and sent to newcomers. A standby leads when a majority of a run's last view has come to it.
It warns when it leads one run and another master leads a different one: two runs never merge.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping, Sequence

import trio

from pccl.protocol.wait_reasons import LongWait, how_to_look
from pccl.runtime.network import addresses
from pccl.runtime.network.addresses import Address
from pccl.runtime.network.clients import NoAnswer, ask
from pccl.runtime.network.dialing import Dial, dial_tcp

logger = logging.getLogger("pccl.master")

SILENT = "no answer from "


async def watch(
    masters: Sequence[Address],
    token: str,
    ssl_context: ssl.SSLContext | None,
    interval_s: float,
    report: Callable[[str], None],
    own_run: Callable[[], str],
    dial: Dial = dial_tcp,
) -> None:
    """Request the status of all masters every `interval_s`, and call `report` when it changes. `own_run` returns the
    run that this master leads, or ""."""
    known, warned = "", ""
    silences: dict[Address, LongWait] = {}
    while True:
        looked = [await _look(address, token, ssl_context, interval_s, dial) for address in masters]
        _warn_of_silence(silences, dict(zip(masters, looked, strict=True)))
        found = "; ".join(text for text, _ in looked)
        if found != known:
            logger.info("%s", found)
            report(found)
        known = found
        own = own_run()
        others = "; ".join(text for text, run in looked if own and run not in ("", None, own))
        if others and others != warned:
            text = "two runs: %s, and this one leads run %s. They do not merge: restart the peers of one of them"
            logger.warning(text, others, own)
        warned = others
        await trio.sleep(interval_s)


def _warn_of_silence(silences: dict[Address, LongWait], looked: Mapping[Address, tuple[str, str | None]]) -> None:
    now = trio.current_time()
    for address, (text, run) in looked.items():
        where = addresses.join(*address)
        if run is None:
            silence = silences.setdefault(address, LongWait("the standby's question", now))
            if silence.is_due(now):
                logger.warning("%s", silence.warning(now, text.removeprefix(SILENT), how_to_look(where)))
        elif (over := silences.pop(address, None)) is not None and over.is_told:
            logger.warning("the master at %s answers again: %s", where, over.ending(now))


async def _look(
    address: Address, token: str, ssl_context: ssl.SSLContext | None, limit_s: float, dial: Dial
) -> tuple[str, str | None]:
    """Return a description of a master, and the run that it leads; "": none, None: no answer."""
    where = addresses.join(*address)
    try:
        with trio.fail_after(limit_s):
            status = await ask(*address, token, ssl_context, dial)
    except NoAnswer as error:
        return f"{SILENT}the master at {where} ({error})", None
    except trio.TooSlowError:
        return f"{SILENT}the master at {where} within {limit_s:g} s", None
    if any(member.state == "accepted" for member in status.members):
        return f"the master at {where} leads run {status.run} in term {status.term}", status.run
    return f"the master at {where} answers and leads no run", ""
