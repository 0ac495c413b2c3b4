"""Peers whose programs have changed how their threads compute: the same bits as on the others, all the same."""

from __future__ import annotations

import subprocess

import pytest

from pccl import MasterNode
from pccl._floating_point import default_environment
from tests.api import odd_arithmetic
from tests.api.arithmetic_peer import KINDS
from tests.processes import fork_server
from tests.support.cluster import WAIT_S, Background, together

MODULE = "tests.api.arithmetic_peer"
WITH_TORCH = ("ddp", "torch_diloco")
PEERS = [("usual", "before"), ("flush", "after"), ("downward", "before")]

pytestmark = pytest.mark.skipif(not odd_arithmetic.IS_KNOWN, reason="how this machine computes is not known here")


@pytest.mark.parametrize("environment", odd_arithmetic.ENVIRONMENTS)
def test_float_environment_of_a_thread_is_restored(environment: str) -> None:
    seen = []

    def in_a_thread() -> None:
        odd_arithmetic.take(environment)
        for error in (None, KeyboardInterrupt):
            try:
                with default_environment():
                    seen.append(odd_arithmetic.current())
                    if error is not None:
                        raise error
            except KeyboardInterrupt:
                pass
            seen.append(odd_arithmetic.current())

    Background(in_a_thread).result()
    assert seen == ["usual", environment] * 2
    assert odd_arithmetic.current() == "usual"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in WITH_TORCH])
def test_peers_in_any_float_environment_get_the_same_bits(master: MasterNode, kind: str) -> None:
    _get_the_same_bits(master, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH_TORCH)
def test_torch_peers_in_any_float_environment_get_the_same_bits(master: MasterNode, kind: str) -> None:
    pytest.importorskip("torch")
    _get_the_same_bits(master, kind)


def _get_the_same_bits(master: MasterNode, kind: str) -> None:
    same = str(len(PEERS)), kind, master.address
    processes = [fork_server.start(MODULE, *each, *same, stdout=subprocess.PIPE) for each in PEERS]
    try:
        printed = together([process.stdout.read for process in processes])  # type: ignore[union-attr]
        ends = [process.wait(WAIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    lines = [each.split() for each in printed]
    assert ends == [0] * len(PEERS)
    assert lines[0]
    for (environment, when), line in zip(PEERS, lines, strict=True):
        differing = [i for i, (mine, usual) in enumerate(zip(line, lines[0], strict=True)) if mine != usual]
        assert not differing, f"{environment} {when}: {len(differing)} of {len(line)} digests differ, at {differing}"
    if kind == "reduce_all":
        assert lines[0][-1] == "True", "the sums are not those of IEEE 754"
