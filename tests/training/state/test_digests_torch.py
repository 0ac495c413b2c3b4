"""When peers compare, what newcomers that differ are told, and what an exchange does to buffers of every kind."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, MasterNode
from pccl.training import SPSA, AsyncDiLoCo, DiLoCo, DivergenceError, SPSAOptions
from pccl.training.group.relaunch import Relaunched
from pccl.training.state import digests
from pccl.training.state.buffers import Buffers, exchanged_buffers
from pccl.training.state.digests import Check, Snapshot
from tests.support.cluster import Background, Cluster, run_of, together, until

torch = pytest.importorskip("torch")


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def snapshots_made(
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    hash_s: float,
    every: int | None,
    waits_s: Iterable[float] = (0.0,),
) -> list[int]:
    """Return after which of 300 steps, of a second each, two peers compare, where one of them takes `hash_s` to hash
    and then waits for the other, each of `waits_s` in turn."""
    clock, waits = Clock(), cycle(waits_s)
    monkeypatch.setattr(digests, "time", clock)

    class Awaited(Relaunched):
        def wait(self) -> Any:
            clock.now_s += next(waits) if self._communicator is cluster[1] else 0.0
            return super().wait()

    monkeypatch.setattr(digests, "Relaunched", Awaited)
    made: list[int] = []
    checks = [Check(peer, 7, every, parting_tag=8) for peer in cluster.peers]

    def snapshot(revision: int, is_slow: bool) -> Snapshot:
        if is_slow:
            clock.now_s += hash_s
            made.append(revision)
        return Snapshot(revision, [("a", np.zeros(3, np.float32))], {})

    for check in checks:
        check.come_soon(0)
    for revision in range(1, 301):
        clock.now_s += 1
        expected = [check.expects(revision) for check in checks]
        assert expected[0] == expected[1]
        for check, is_slow in zip(checks, (False, True), strict=True):
            if expected[0]:
                check.note(partial(snapshot, revision, is_slow))
            check.launch()
        for check in checks:
            check.land()
    return made


def test_comparison_interval_grows_to_cost_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with run_of(2) as cluster:
        assert snapshots_made(cluster, monkeypatch, 0.0, None) == [1, *range(3, 301)]
        rare = snapshots_made(cluster, monkeypatch, 0.05, None)
        assert snapshots_made(cluster, monkeypatch, 0.05, 100) == [100, 200, 300]
    assert rare == [1, 3, 7, 15, 31, 63, 127, 227]  # 0.05 s are half a thousandth of 100 steps


def test_divergent_peer_lost_before_account() -> None:
    with run_of(3) as cluster:
        checks = [Check(peer, 7, 1, parting_tag=8) for peer in cluster.peers]
        for value, check in enumerate(checks):
            array = np.full(3, value == 2, np.float32)
            check.note(lambda array=array: Snapshot(1, [("a", array)], {}))
        for check in checks[:2]:
            check.launch()
        cluster.close(cluster.peers[2])
        together([check.land for check in checks[:2]])


def test_divergent_newcomer_leaves(master: MasterNode) -> None:
    def frozen(value: float) -> Any:
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(value)
        module[0].requires_grad_(False)
        return module

    peers = [DiLoCo(Communicator(master.address), frozen(1.0), check_every=1) for _ in range(2)]

    def run(diloco: DiLoCo) -> None:
        diloco.connect()
        diloco.join(2)
        admitted = 0
        while admitted == 0 or diloco.revision < admitted + 3:
            if diloco.outer_step().admitted:  # the same on all peers
                admitted = diloco.revision

    threads = [Background(partial(run, diloco)) for diloco in peers]
    until(lambda: peers[0].revision > 2, "steps are made")
    newcomer = DiLoCo(Communicator(master.address), frozen(2.0), check_every=1)
    newcomer.connect()
    with pytest.raises(DivergenceError, match=r"frozen parameter 0\.weight") as caught:
        newcomer.join()
    assert caught.value.peers == (3,)
    for thread in threads:
        thread.result()
    assert peers[0].digest() == peers[1].digest()
    together([diloco._communicator.close for diloco in peers])


@pytest.mark.parametrize("make", [DiLoCo, AsyncDiLoCo, partial(SPSA, options=SPSAOptions(1e-3))])
def test_frozen_parameters_are_compared(master: MasterNode, make: Any) -> None:
    def frozen(value: float) -> Any:
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        for parameter in module.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        module[0].requires_grad_(False).weight.fill_(value)
        return module

    def join(value: float) -> str:
        training = make(Communicator(master.address), frozen(value))
        training._communicator.connect()
        with pytest.raises(DivergenceError, match=r"frozen parameter 0\.weight") as caught:
            training.join(3)
        assert training._model[0].weight.unique().tolist() == [value]
        return str(caught.value)

    texts = together([partial(join, value) for value in (1.0, 1.0, 2.0)])
    assert sum("(this one) differs from peers" in text for text in texts) == 1


class Odd(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Buffers of many kinds."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.1, float("-inf"), float("nan"), 0.7]))
        self.register_buffer("flags", torch.tensor([number == 1, False]))
        self.register_buffer("count", torch.tensor(3 + number))
        self.register_buffer("turned", torch.tensor([1j * number, 2 + 0j]))
        self.register_buffer("short", torch.full((2, 2), 1.0 + number, dtype=torch.bfloat16).t())
        self.register_buffer("wide", torch.ones(1).expand(5))
        self.register_buffer("nothing", None)
        self.register_buffer("replaced", torch.zeros(2), persistent=False)


@pytest.mark.parametrize("rule", ["average", "first"])
def test_buffers_of_every_dtype_converge(rule: str) -> None:
    with run_of(3) as cluster:
        modules = [Odd(0) for _ in range(3)]
        buffers = [exchanged_buffers(module, rule) for module in modules]
        for number, module in enumerate(modules):
            module._buffers.update({name: b for name, b in Odd(number)._buffers.items() if name != "mask"})
            module.replaced = torch.tensor([number, 3.0 * number])

        def exchange(peer: Communicator, i: int) -> None:
            buffers[i].launch(peer, 5, 0)
            modules[i].replaced = modules[i].replaced + 1  # in a forward pass during the exchange
            buffers[i].land(keep_going=True)

        masks = [module.mask.numpy().tobytes() for module in modules]
        cluster.each(exchange)
    assert [module.mask.numpy().tobytes() for module in modules] == masks
    if rule == "average":
        expected = Odd(1).state_dict() | {"count": torch.tensor(5), "turned": torch.tensor([1j, 2 + 0j])}
        replaced = torch.tensor([1.0, 3.0])
    else:
        expected, replaced = Odd(0).state_dict(), torch.tensor([0.0, 0.0])
    for module in modules:
        state = module.state_dict()
        for name in ("flags", "count", "turned", "short", "wide"):
            torch.testing.assert_close(state[name], expected[name])
        torch.testing.assert_close(module.replaced, replaced + 1)
    digests = {Snapshot(0, each.tensors(), {}).digest() for each in buffers}
    assert len(digests) == 1


def test_resized_buffer_is_refused(master: MasterNode) -> None:
    module = Odd(0)
    buffers: Buffers = exchanged_buffers(module, "average")
    module.replaced = torch.zeros(3)
    with pytest.raises(ValueError, match=r"buffer 'replaced' was torch\.float32 of shape \(2,\)"):
        buffers.launch(Communicator(master.address), 1, 0)
