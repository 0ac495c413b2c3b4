"""Runs several local processes as one: the machinery of `pccl launch`, on the standard library alone.

`guard` ties processes to the life of their starter, `interpreter` makes them import the same pccl, `child` speaks with
one of them line by line: these are for everything that starts processes here. `lines` prints the output of many without
mixing lines, `ranks` tells copies on several machines their place, `supervisor` starts a master and N copies of a
script, relays signals and gathers exit codes.
"""

from pccl.launcher.child import Child, Heard, say_line
from pccl.launcher.guard import Guard
from pccl.launcher.interpreter import local_environment, module_command
from pccl.launcher.ranks import Nodes, NodesError, masters_address, nodes
from pccl.launcher.supervisor import LaunchOptions, launch

__all__ = [
    "Child",
    "Guard",
    "Heard",
    "LaunchOptions",
    "Nodes",
    "NodesError",
    "launch",
    "local_environment",
    "masters_address",
    "module_command",
    "nodes",
    "say_line",
]
