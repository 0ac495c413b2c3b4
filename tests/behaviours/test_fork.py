"""A forked child has no part in the run: its calls fail, and the parent's go on."""

from __future__ import annotations

from tests.behaviours.processes import line_of, peer_process
from tests.support.cluster import ones

SCRIPT = """
child = os.fork()
if child == 0:
    try:
        comm.all_reduce(x)
    except PCCLError:
        print("child fails", flush=True)
    sys.exit(7)
print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
comm.all_reduce(x)
print("reduced", x[0], flush=True)
"""


def test_calls_in_a_forked_child_fail() -> None:
    with peer_process(SCRIPT) as (peer, process):
        assert [line_of(process), line_of(process)] == ["child fails", "child ended with 7"]
        peer.all_reduce(ones(1000))
        assert line_of(process) == "reduced 4.0"
