"""`pccl master` as a process of a stress run: `python -m pccl.stress.master ARGUMENT...`.

It drops packets of others when the supervisor tells it to.
"""

from __future__ import annotations

import runpy
import sys
import threading

from pccl.stress.commands import commands
from pccl.stress.messages import DropFrom
from pccl.stress.packet_filter import PacketFilter


def _hear() -> None:
    packet_filter = PacketFilter(None)
    for command in commands():
        assert isinstance(command, DropFrom)
        packet_filter.drop_from(command.senders)


if __name__ == "__main__":
    threading.Thread(target=_hear, name="commands", daemon=True).start()
    sys.argv = ["pccl", "master", *sys.argv[1:]]
    runpy.run_module("pccl", run_name="__main__", alter_sys=True)
