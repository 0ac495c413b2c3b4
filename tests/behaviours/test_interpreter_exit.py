"""A process that ends, in whatever call, leaves the run within seconds."""

from __future__ import annotations

import pytest

from tests.behaviours.processes import PROMPT_S, peer_process, until_alone

LEAVES = {
    "end of the program": ("", 0),
    "exit status": ("sys.exit(3)", 3),
    "exception": ("raise ValueError('x')", 1),
    "op in flight": ("handle = comm.all_reduce_async(x, tag=1)", 0),
    "call in a thread": (
        "import threading; threading.Thread(target=comm.all_reduce, args=(x,), daemon=True).start()",
        0,
    ),
}


@pytest.mark.parametrize("script", LEAVES)
def test_exit_leaves_the_run(script: str) -> None:
    code, status = LEAVES[script]
    with peer_process(code) as (peer, process):
        assert process.wait(PROMPT_S) == status
        until_alone(peer)
