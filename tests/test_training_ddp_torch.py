"""Data parallelism with torch: held against one process that has all the data."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pccl import Communicator, MasterNode, QuantizationOptions
from pccl.training import DDP
from pccl.training.ddp import Step
from tests.crew import Background, together

torch = pytest.importorskip("torch")

SMALL_BUCKETS = 40


def new_module() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4), torch.nn.Linear(4, 2))


def new_optimizer(module: Any) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def loss(module: Any, peer: int, step: int) -> Any:
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * peer + step))
    return (module(inputs) - inputs[:, :2]).pow(2).mean()


class DDPPeer:
    def __init__(self, address: str, number: int, **options: Any) -> None:
        self.number = number
        self.module = new_module()
        self.optimizer = new_optimizer(self.module)
        self.communicator = Communicator(address)
        options = {"bucket_bytes": SMALL_BUCKETS, "admit_every": 1, **options}
        self.ddp = DDP(self.communicator, self.module, self.optimizer, **options)
        self.digests: dict[int, str] = {}
        self.steps: list[Step] = []

    @property
    def worlds(self) -> list[int]:
        return [step.world_size for step in self.steps]

    def enter(self, peers: int) -> DDPPeer:
        self.communicator.connect()
        self.ddp.join(peers)
        return self

    def run(self, until: int | Callable[[DDPPeer], bool]) -> DDPPeer:
        while not until(self) if callable(until) else self.ddp.revision < until:
            loss(self.module, self.number, self.ddp.revision).backward()
            self.steps.append(self.ddp.step())
            self.digests[self.ddp.revision] = self.ddp.digest()
        return self


def crew_of(master: MasterNode, count: int, **options: Any) -> list[DDPPeer]:
    peers = [DDPPeer(master.address, number, **options) for number in range(count)]
    together([partial(peer.enter, count) for peer in peers])
    return peers


def close(peers: list[DDPPeer]) -> None:
    together([peer.communicator.close for peer in peers])


def parameters(module: Any) -> Any:
    return torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def assert_parity(peers: list[DDPPeer]) -> None:
    for revision in set().union(*(peer.digests for peer in peers)):
        assert len({peer.digests[revision] for peer in peers if revision in peer.digests}) == 1, revision


@pytest.mark.parametrize("bucket_bytes", [1, SMALL_BUCKETS, 1 << 20])
def test_peers_do_what_one_process_with_all_the_data_does(master: MasterNode, bucket_bytes: int) -> None:
    peers = crew_of(master, 3, bucket_bytes=bucket_bytes)
    together([partial(peer.run, 5) for peer in peers])
    module = new_module()
    optimizer = new_optimizer(module)
    for step in range(5):
        optimizer.zero_grad()
        (sum(loss(module, number, step) for number in range(3)) / 3).backward()
        optimizer.step()
    assert_parity(peers)
    for peer in peers:
        torch.testing.assert_close(parameters(peer.module), parameters(module), rtol=1e-4, atol=1e-5)
    close(peers)


def test_full_buckets_are_on_their_way_during_the_backward_pass(master: MasterNode) -> None:
    (peer,) = crew_of(master, 1)
    launched_before: list[int] = []
    first = next(peer.module.parameters())
    first.register_hook(lambda _: launched_before.append(sum(b.average is not None for b in peer.ddp._buckets)))
    loss(peer.module, 0, 0).backward()
    assert len(peer.ddp._buckets) > 2
    assert launched_before[0] >= len(peer.ddp._buckets) - 2
    peer.ddp.step()
    # From the second step on, the backward pass writes where gradients are sent from.
    loss(peer.module, 0, 1).backward()
    for bucket in peer.ddp._buckets:
        start = bucket.flat.data_ptr()
        for parameter in bucket.parameters:
            assert start <= parameter.grad.data_ptr() < start + bucket.flat.nbytes
    close([peer])


def test_parameters_without_a_part_in_the_loss_count_as_zero(master: MasterNode) -> None:
    peers = crew_of(master, 2)

    def half_step(peer: DDPPeer) -> None:
        # One peer uses all layers, the other one only the last.
        inputs = torch.ones(1, 6) if peer.number == 0 else torch.ones(1, 4)
        module = peer.module if peer.number == 0 else peer.module[3]
        module(inputs).sum().backward()
        peer.ddp.step()

    together([partial(half_step, peer) for peer in peers])
    assert peers[0].ddp.digest() == peers[1].ddp.digest()
    assert not torch.equal(parameters(peers[1].module), parameters(new_module()))
    close(peers)


def test_accumulated_gradients_are_averaged_once(master: MasterNode) -> None:
    peers = crew_of(master, 2)

    def accumulated(peer: DDPPeer) -> None:
        for step in range(3):
            with peer.ddp.no_sync():
                loss(peer.module, peer.number, 2 * step).backward()
            loss(peer.module, peer.number, 2 * step + 1).backward()
            peer.ddp.step()

    together([partial(accumulated, peer) for peer in peers])
    module = new_module()
    optimizer = new_optimizer(module)
    for step in range(3):
        optimizer.zero_grad()
        (sum(loss(module, number, 2 * step + i) for number in range(2) for i in range(2)) / 2).backward()
        optimizer.step()
    torch.testing.assert_close(parameters(peers[0].module), parameters(module), rtol=1e-4, atol=1e-5)
    close(peers)


def test_a_second_backward_pass_is_refused_with_the_way_out(master: MasterNode) -> None:
    (peer,) = crew_of(master, 1)
    loss(peer.module, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"use no_sync\(\)"):
        loss(peer.module, 0, 1).backward()
    close([peer])


def test_newcomers_get_the_optimizers_moments_too(master: MasterNode) -> None:
    peers = crew_of(master, 2, quantization=QuantizationOptions())
    together([partial(peer.run, 3) for peer in peers])
    newcomer = DDPPeer(master.address, 2, quantization=QuantizationOptions())

    def three_have_met_twice(peer: DDPPeer) -> bool:
        return peer.worlds.count(3) == 2

    threads = [Background(partial(peer.run, three_have_met_twice)) for peer in peers]
    newcomer.enter(1).run(three_have_met_twice)
    for thread in threads:
        thread.result()
    assert len(newcomer.digests) == 2
    assert_parity([*peers, newcomer])
    close([*peers, newcomer])


def test_who_is_lost_between_two_buckets_is_left_out(master: MasterNode) -> None:
    peers = crew_of(master, 3)
    leaver = peers.pop()
    threads = [Background(partial(peer.run, 5)) for peer in peers]
    leaver.run(2)
    # Some buckets of the third step are launched, the others never will be.
    with leaver.ddp.no_sync():
        loss(leaver.module, 2, 2).backward()
    for number in range(2):
        leaver.ddp._launch(number)
    leaver.communicator.close()
    for thread in threads:
        thread.result()
    assert_parity([*peers, leaver])
    assert peers[0].worlds == [3, 3, 2, 2, 2]
    close(peers)


def test_a_fresh_optimizer_is_as_before() -> None:
    with MasterNode("127.0.0.1:0") as master:
        module = new_module()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.25, weight_decay=0.5, amsgrad=True)
        DDP(Communicator(master.address), module, optimizer).close()
        assert torch.equal(parameters(module), parameters(new_module()))
        assert optimizer.param_groups[0]["lr"] == 0.25
        for state in optimizer.state.values():
            assert all(float(tensor.abs().sum()) == 0 for tensor in state.values())
