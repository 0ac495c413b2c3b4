"""`pccl master` as a process of a stress run: `python -m pccl.stress.master ARGUMENT...`, which can be made deaf."""

from __future__ import annotations

import runpy
import sys
import threading

from pccl.stress.commands import commands
from pccl.stress.deafness import Ears
from pccl.stress.messages import BeDeaf


def _hear() -> None:
    ears = Ears(None)
    for command in commands():
        assert isinstance(command, BeDeaf)
        ears.be_deaf_to(command.to)


if __name__ == "__main__":
    threading.Thread(target=_hear, name="commands", daemon=True).start()
    sys.argv = ["pccl", "master", *sys.argv[1:]]
    runpy.run_module("pccl", run_name="__main__", alter_sys=True)
