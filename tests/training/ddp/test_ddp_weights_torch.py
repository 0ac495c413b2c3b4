"""DDP with weights: held against one process that has all the samples, and what is lost or wrong on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from pccl import MasterNode, Result
from pccl.training import ElasticSampler, comm_hooks
from pccl.training.ddp.gradients import Bucket
from tests.support.cluster import Background, outcomes, refusal, results, together, until
from tests.training.test_ddp_torch import DDPPeer, close, cluster_of, new_module, new_optimizer, parameters

torch = pytest.importorskip("torch")

BATCHES = (12, 1, 5)
"""Samples of each peer."""


def batch(number: int, step: int, size: int) -> Any:
    return torch.randn(size, 6, generator=torch.Generator().manual_seed(1000 * number + step))


def mean_loss(module: Any, inputs: Any) -> Any:
    return (module(inputs) - inputs[:, :2]).pow(2).mean()


def train(peer: DDPPeer, count: int, weight: float | None, batch_size: int = 8) -> None:
    for _ in range(count):
        mean_loss(peer.module, batch(peer.number, peer.ddp.revision, batch_size)).backward()
        peer.steps.append(peer.ddp.step(weight=weight))
        peer.digests[peer.ddp.revision] = peer.ddp.digest()


def assert_parity(peers: Sequence[DDPPeer]) -> None:
    for revision in set().union(*(peer.digests for peer in peers)):
        assert len({peer.digests[revision] for peer in peers if revision in peer.digests}) == 1, revision


def reference(steps: int, sizes: Sequence[int], max_norm: float = math.inf) -> Any:
    module = new_module()
    optimizer = new_optimizer(module)
    for step in range(steps):
        optimizer.zero_grad()
        mean_loss(module, torch.cat([batch(number, step, size) for number, size in enumerate(sizes)])).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        optimizer.step()
    return parameters(module)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("scale", "bucket_bytes"), [(2.0**40, 1 << 20), (1e-300, 40)])
def test_weights_of_unequal_batches(master: MasterNode, scale: float, bucket_bytes: int) -> None:
    peers = cluster_of(master, 3, bucket_bytes=bucket_bytes)
    together([partial(train, peer, 3, size * scale, size) for peer, size in zip(peers, BATCHES, strict=True)])
    assert_parity(peers)
    for peer in peers:
        torch.testing.assert_close(parameters(peer.module), reference(3, BATCHES), rtol=1e-4, atol=1e-5)
    close(peers)


def test_global_batch_is_constant(master: MasterNode) -> None:
    """Peers together do as one process with the whole batch, before and after one of them has left."""
    peers = cluster_of(master, 3, global_batch=10)

    def script(peer: DDPPeer) -> None:
        for _ in range(3):
            size, rank, world = peer.ddp.batch_size, peer.ddp.rank, peer.communicator.world_size
            begin = rank * (10 // world) + min(rank, 10 % world)
            samples = batch(0, peer.ddp.revision, 10)[begin : begin + size]
            mean_loss(peer.module, samples).backward()
            assert peer.ddp.step().world_size == world
            peer.digests[peer.ddp.revision] = peer.ddp.digest()

    together([partial(script, peer) for peer in peers])
    close([peers.pop()])
    until(lambda: all(peer.communicator.world_size == 2 for peer in peers), "all have seen the loss")
    together([partial(script, peer) for peer in peers])
    assert_parity(peers)
    for peer in peers:
        torch.testing.assert_close(parameters(peer.module), reference(6, [10]), rtol=1e-4, atol=1e-5)
        assert peer.ddp.batch_size == 5
    close(peers)


def test_global_batch_is_drawn_from_a_sampler_by_any_number_of_peers(master: MasterNode) -> None:
    """Every sample is used once per epoch, in as many steps, with three peers and with the two that are left."""
    samplers = [ElasticSampler(40, seed=0, batch_size=1) for _ in range(3)]
    peers = [
        DDPPeer(master.address, number, global_batch=10, shared={"sampler": sampler})
        for number, sampler in enumerate(samplers)
    ]
    together([partial(peer.enter, 3) for peer in peers])
    used: list[int] = []

    def epoch(peer: DDPPeer) -> int:
        sampler, began = samplers[peer.number], peer.ddp.revision
        while sampler.epoch < 1 + began // 4:
            sampler.batch_size = peer.ddp.batch_size
            drawn = next(sampler.batches())
            used.extend(drawn.tolist())
            mean_loss(peer.module, batch(0, 0, 40)[drawn]).backward()
            peer.steps.append(peer.ddp.step())
            peer.digests[peer.ddp.revision] = peer.ddp.digest()
        return peer.ddp.revision - began

    assert together([partial(epoch, peer) for peer in peers]) == [4, 4, 4]
    assert sorted(used) == list(range(40))
    close([peers.pop()])
    until(lambda: all(peer.communicator.world_size == 2 for peer in peers), "all have seen the loss")
    used.clear()
    assert together([partial(epoch, peer) for peer in peers]) == [4, 4]
    assert sorted(used) == list(range(40))
    assert_parity(peers)
    samplers[0].batch_size = 1
    next(samplers[0].batches())
    with pytest.raises(RuntimeError, match="1 samples were drawn for this step, but this peer's share of global_batch"):
        peers[0].ddp.step()
    close(peers)


def test_weight_of_synchronize_precedes_the_global_batch(master: MasterNode) -> None:
    (peer,) = cluster_of(master, 1, global_batch=10)
    mean_loss(peer.module, batch(0, 0, 4)).backward()
    peer.ddp.synchronize(weight=4)
    assert peer.ddp.step().revision == 1
    close([peer])


def test_global_batch_needs_a_sample_for_each_peer(master: MasterNode) -> None:
    peers = cluster_of(master, 3, global_batch=2)
    mean_loss(peers[0].module, batch(0, 0, 2)).backward()
    with pytest.raises(ValueError, match="global_batch must be at least the number of peers, 3, not 2"):
        peers[0].ddp.step()
    close(peers)


def test_weighted_accumulation_and_clipping(master: MasterNode) -> None:
    peers = cluster_of(master, 3)

    def script(peer: DDPPeer) -> None:
        size = BATCHES[peer.number]
        for step in range(4):
            inputs = batch(peer.number, step, size)
            with peer.ddp.no_sync():
                for part in inputs[1:].split(4):
                    (mean_loss(peer.module, part) * len(part) / size).backward()
            (mean_loss(peer.module, inputs[:1]) / size).backward()
            peer.ddp.synchronize(weight=size)
            torch.nn.utils.clip_grad_norm_(peer.module.parameters(), 0.05)
            peer.ddp.step(weight=size)
            peer.digests[peer.ddp.revision] = peer.ddp.digest()

    together([partial(script, peer) for peer in peers])
    assert_parity(peers)
    expected = reference(4, BATCHES, max_norm=0.05)
    torch.testing.assert_close(parameters(peers[0].module), expected, rtol=1e-4, atol=1e-5)
    close(peers)


@pytest.mark.parametrize("world", [1, 2])
def test_zero_weights_give_zero_mean(master: MasterNode, world: int) -> None:
    peers = cluster_of(master, world)
    for _ in range(2):
        for peer in peers:
            mean_loss(peer.module, batch(peer.number, 0, 8)).backward()
        together([partial(peer.ddp.synchronize, weight=0.0) for peer in peers])
        assert all(not p.grad.any() for peer in peers for p in peer.module.parameters())
        together([partial(peer.ddp.step) for peer in peers])
    together([partial(train, peer, 1, 1.0) for peer in peers])
    assert_parity(peers)
    close(peers)


@pytest.mark.parametrize("compression", [None, "2bit"])
def test_steps_with_and_without_weights_alternate(master: MasterNode, compression: str | None) -> None:
    peers = cluster_of(master, 2, compression=compression)
    for weights in [(None, None), (1.0, 3.0), (None, None), (2.0, 6.0), (2.0, 6.0)]:
        together([partial(train, peer, 1, weight) for peer, weight in zip(peers, weights, strict=True)])
    assert_parity(peers)
    # What a step is weighted by in one that is not: the same gradients have gone out twice on the way in and out.
    sent = [step.tx_bytes for step in peers[0].steps]
    assert sent[0] < sent[4] * (1.5 if compression is None else 1.1) < sent[1]
    close(peers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex128])
def test_weighing_leaves_gradients_as_they_are(dtype: Any) -> None:
    """A bucket may be weighed again, after a loss or for another exponent."""
    bucket = Bucket(torch, [torch.nn.Parameter(torch.zeros(3, dtype=dtype))])
    bucket.flat.fill_(2)
    for factor in (0.25, 0.5):
        assert bool((bucket.weighed(factor) == 2 * factor).all())
    assert bool((bucket.flat == 2).all())


@pytest.mark.parametrize("compression", ["4bit", "2bit", "1bit"])
def test_feedback_follows_weights_that_change(master: MasterNode, compression: str) -> None:
    peers = cluster_of(master, 2, compression=compression, bucket_bytes=1 << 20)
    for weight in (1.0, 15.0, 15.0, 1.0, 1.0):  # of one exponent, once 15 has been seen
        for peer in peers:
            for number, parameter in enumerate(peer.module.parameters()):
                generator = torch.Generator().manual_seed(1000 * peer.number + 100 * peer.ddp.revision + number)
                (parameter * torch.randn(parameter.shape, generator=generator)).sum().backward()
        exact = torch.stack([gradient(peer) for peer in peers]).mean(0)
        together([partial(peer.ddp.synchronize, weight=weight) for peer in peers])
        assert (gradient(peers[0]) - exact).norm() < 1.5 * exact.norm()
        together([partial(peer.ddp.step) for peer in peers])
    close(peers)


def gradient(peer: DDPPeer) -> Any:
    return torch.cat([parameter.grad.flatten() for parameter in peer.module.parameters()]).clone()


def test_hook_and_weights_are_refused(master: MasterNode) -> None:
    peer = DDPPeer(master.address, 0)
    peer.ddp.register_comm_hook(None, comm_hooks.allreduce_hook)
    peer.enter(1)
    mean_loss(peer.module, batch(0, 0, 8)).backward()
    assert "weight= cannot be given with a communication hook" in str(refusal(partial(peer.ddp.step, weight=1)))
    assert peer.ddp.step().revision == 1
    close([peer])


@pytest.mark.parametrize("are_weighted", [False, True])
def test_weights_on_some_peers_are_refused(master: MasterNode, are_weighted: bool) -> None:
    peers = cluster_of(master, 3)
    together([partial(train, peer, 2, 1.0 if are_weighted else None) for peer in peers])
    weights = [2.0, None, 2.0]
    found = outcomes([partial(train, peer, 1, weight) for peer, weight in zip(peers, weights, strict=True)])
    assert results(found) == [Result.INVALID_USAGE] * 3
    number = peers[1].communicator.membership.peers[peers[1].communicator.membership.rank]
    whose = [f"peer {number}", "this peer", f"peer {number}"]
    assert all(f"{who} gave no weight=" in str(error) for who, error in zip(whose, found, strict=True))
    together([partial(train, peer, 2, 5.0) for peer in peers])
    assert_parity(peers)
    close(peers)


def test_newcomers_count_by_weight(master: MasterNode) -> None:
    first = cluster_of(master, 2)
    late = DDPPeer(master.address, 2)

    def until_three(peer: DDPPeer) -> None:
        while not peer.steps or peer.steps[-1].world_size < 3:
            train(peer, 1, 1.0 + peer.number)
        train(peer, 2, 1.0 + peer.number)

    threads = [Background(partial(until_three, peer)) for peer in first]
    late.enter(1)
    until_three(late)
    for thread in threads:
        thread.result()
    assert_parity([*first, late])
    close([*first, late])
