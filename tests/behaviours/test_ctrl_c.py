"""Ctrl-C in a call that waits ends it within a second, withdraws it on all peers, and leaves arrays unchanged."""

from __future__ import annotations

import signal

import pytest

from tests.behaviours.processes import line_of, peer_process
from tests.support.cluster import ones

SCRIPT = """
try:
    print("calling", flush=True)
    {call}
except KeyboardInterrupt:
    print("interrupted", bool((x == 3).all()), flush=True)
x[:] = 1
comm.all_reduce(x, tag=2)
print("reduced", x[0], flush=True)
"""


@pytest.mark.parametrize("call", ["comm.all_reduce(x, tag=1)", "comm.update_topology()", "comm.are_peers_pending()"])
def test_ctrl_c_ends_a_call(call: str) -> None:
    with peer_process(SCRIPT.format(call=call)) as (peer, process):
        assert line_of(process) == "calling"
        process.send_signal(signal.SIGINT)
        assert line_of(process) == "interrupted True"
        x = ones(1000)
        peer.all_reduce(x, tag=2)
        assert line_of(process) == "reduced 2.0"
        assert x[0] == 2
