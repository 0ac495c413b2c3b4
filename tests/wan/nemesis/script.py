"""Helpers of both scripts, `peer` and `trainer`: sessions one after the other, the wish to leave, and what is used."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import asdict, dataclass

from pccl import Communicator, PCCLError, Result
from tests.wan.nemesis.history import Reporter
from tests.wan.nemesis.values import Load

LEFT_OUT = (Result.MASTER_CONNECTION_FAILED, Result.RANK_CONNECTION_FAILED)
"""The peer was evicted or refused, or has lost the master for long: it connects again."""
PAUSE_S = 0.3
"""The time between two sessions."""
USAGE_EVERY_S = 1.0


class OwnEndError(Exception):
    """The script ends its session, as one does that cannot know how a call of its has ended."""


class Script(ABC):
    """Sessions until SIGTERM. What a call raises beyond what the documentation says is reported as a crash."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.reporter = Reporter(settings.history)
        self.session = 0
        self.is_leaving = False
        self._usage_at_s = 0.0

    def run(self) -> int:
        self.reporter.say("start", workload=self.settings.workload)
        try:
            while not self.is_leaving:
                self.session += 1
                self._run_session()
                with suppress(InterruptedError):
                    time.sleep(0 if self.is_leaving else PAUSE_S)
        except BaseException:
            self.reporter.say("crash", text=traceback.format_exc())
            return 1
        self.reporter.say("done")
        return 0

    def leave(self, *_: object) -> None:
        self.is_leaving = True
        self.reporter.say("leaving")

    def _run_session(self) -> None:
        settings = self.settings
        communicator = Communicator(settings.masters, name=settings.peer, master_timeout=settings.master_timeout_s)
        try:
            self.reporter.say("connecting")
            communicator.connect()
            membership = communicator.membership
            self.reporter.say("joined", number=membership.peers[membership.rank])
            self.take_part(communicator)
        except OwnEndError as error:
            self.left("OWN_END", str(error))
        except PCCLError as error:
            if error.result not in LEFT_OUT:
                raise
            self.left(error.result.name, str(error))
        finally:
            communicator.close()
            self.reporter.say("closed")

    @abstractmethod
    def take_part(self, communicator: Communicator) -> None:
        """Do what the script does while it is a peer of the run, until `is_leaving`."""

    def left(self, verdict: str, text: str) -> None:
        """Note that the session is over."""
        self.reporter.say("left", verdict=verdict, text=text)

    def report_usage(self) -> None:
        now = time.monotonic()
        if now < self._usage_at_s + USAGE_EVERY_S:
            return
        self._usage_at_s = now
        with open("/proc/self/statm") as file:
            rss = int(file.read().split()[1]) * resource.getpagesize()
        count = {name: len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")}
        self.reporter.say("usage", rss=rss, descriptors=count["fd"] - 1, threads=count["task"])


def main(script: type[Script]) -> None:
    """Run the script, whose settings are the first argument of the process."""
    faulthandler.register(signal.SIGUSR1)
    faulthandler.enable()
    running = script(Settings.decode(sys.argv[1]))
    signal.signal(signal.SIGTERM, running.leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C at the terminal is for the supervisor
    sys.exit(running.run())


@dataclass(frozen=True)
class Settings:
    masters: str
    peer: str
    """The process, such as 3.2: the second one on host 3."""
    history: str
    """The file for its events."""
    seed: int
    load: Load
    workload: str = "steps"
    master_timeout_s: float = 20.0
    folder: str = ""
    """The folder for checkpoints; empty: there are none."""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> Settings:
        values = json.loads(text)
        return cls(**{**values, "load": Load(**values["load"])})
