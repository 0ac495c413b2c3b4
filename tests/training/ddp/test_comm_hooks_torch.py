"""Communication hooks: of `DDP`, and of pccl for torch's own DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pccl import MasterNode, PCCLError, QuantizationOptions, Result
from pccl.training import comm_hooks
from pccl.training.comm_hooks import GradBucket
from tests.support.cluster import Background, outcomes, refusal, results, together
from tests.training.test_ddp_torch import DDPPeer, assert_parity, close, loss, new_module, new_optimizer, parameters

torch = pytest.importorskip("torch")


def hooked_cluster(master: MasterNode, hooks: list[tuple[Any, Any]], **options: Any) -> list[DDPPeer]:
    peers = [DDPPeer(master.address, number, **options) for number in range(len(hooks))]
    for peer, hook in zip(peers, hooks, strict=True):
        peer.ddp.register_comm_hook(*hook)
    together([partial(peer.enter, len(peers)) for peer in peers])
    return peers


def expected(count: int, steps: int) -> Any:
    """The parameters after these steps of `count` peers."""
    module = new_module()
    optimizer = new_optimizer(module)
    for step in range(steps):
        optimizer.zero_grad()
        (sum(loss(module, number, step) for number in range(count)) / count).backward()
        optimizer.step()
    return parameters(module)


def two_rounds(state: Any, bucket: GradBucket) -> Any:
    """Average in two rounds, as PowerSGD does: what is sent next depends on what came; alone and with others the
    same."""
    assert bucket.buffer().numel() == sum(p.numel() for p in bucket.parameters())
    assert [g.shape for g in bucket.gradients()] == [p.shape for p in bucket.parameters()]
    state.add((bucket.index(), bucket.is_last()))
    scale = bucket.buffer().abs().max().reshape(1)

    result = torch.futures.Future()

    def second(largest: Any) -> None:
        by = largest.value() + 1e-20
        mean = bucket.average((bucket.buffer() / by).double())
        mean.then(lambda mean: result.set_result((mean.value() * by).float()))

    bucket.average(scale).then(second)
    return result


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(
    ("state", "hook", "tolerance"),
    [
        (None, comm_hooks.allreduce_hook, 1e-5),
        (None, comm_hooks.fp16_compress_hook, 1e-3),
        (None, comm_hooks.bf16_compress_hook, 1e-2),
        (QuantizationOptions(), comm_hooks.quantization_hook, 2e-2),
        (set(), two_rounds, 1e-5),
    ],
)
def test_comm_hooks_keep_replicas_identical(
    master: MasterNode, state: Any, hook: Callable[[Any, GradBucket], Any], tolerance: float
) -> None:
    peers = hooked_cluster(master, [(state, hook)] * 3)
    together([partial(peer.run, 3) for peer in peers])
    assert_parity(peers)
    torch.testing.assert_close(parameters(peers[0].module), expected(3, 3), rtol=tolerance, atol=tolerance)
    if isinstance(state, set):
        count = len(peers[0].ddp._buckets)
        assert state == {(number, number == count - 1) for number in range(count)}
    leaver = peers.pop()
    threads = [Background(partial(peer.run, 6)) for peer in peers]
    loss(leaver.module, 2, 3).backward()
    leaver.communicator.close()
    for thread in threads:
        thread.result()
    assert_parity(peers)
    assert peers[0].worlds[-1] == 2
    peers.pop().communicator.close()
    peers[0].run(8)
    assert peers[0].worlds[-1] == 1
    close(peers)


def test_compress_hooks_send_fewer_bytes(master: MasterNode) -> None:
    def sent(hook: Any) -> int:
        peers = hooked_cluster(master, [(None, hook)] * 2, bucket_bytes=1 << 20)
        together([partial(peer.run, 1) for peer in peers])
        close(peers)
        return peers[0].steps[0].tx_bytes

    assert sent(comm_hooks.fp16_compress_hook) < 0.6 * sent(comm_hooks.allreduce_hook)


def test_hook_may_return_a_tensor(master: MasterNode) -> None:
    def negate(_: Any, bucket: GradBucket) -> Any:
        return -bucket.buffer()

    (peer,) = hooked_cluster(master, [(None, negate)])
    loss(peer.module, 0, 0).backward()
    own = [p.grad.clone() for p in peer.module.parameters()]
    peer.ddp.synchronize()
    assert all(torch.equal(p.grad, -was) for p, was in zip(peer.module.parameters(), own, strict=True))
    peer.ddp.step()
    loss(peer.module, 0, 1).backward()
    torch.nn.utils.clip_grad_norm_(peer.module.parameters(), 1.0)
    assert "has changed the gradient of" in str(refusal(peer.ddp.step))
    close([peer])


def test_different_hooks_refuse_the_step(master: MasterNode) -> None:
    def other(_: Any, bucket: GradBucket) -> Any:
        return bucket.average(bucket.buffer()).then(lambda mean: mean.value() / 2)

    peers = hooked_cluster(master, [(None, comm_hooks.allreduce_hook), (None, other)])
    before = parameters(new_module())
    found = outcomes([partial(peer.run, 1) for peer in peers])
    assert results(found) == [Result.INVALID_USAGE] * 2
    assert all("registered a different communication hook than this peer" in str(error) for error in found)
    assert all(torch.equal(parameters(peer.module), before) for peer in peers)
    close(peers)


def test_invalid_hooks_are_refused(master: MasterNode) -> None:
    returns: list[tuple[Any, type[Exception], str]] = [
        (lambda _, bucket: torch.futures.Future(), RuntimeError, "a future that never completes"),
        (lambda _, bucket: torch.ones(1), TypeError, "must return a tensor of 74 elements, not 1 elements"),
        (lambda _, bucket: None, TypeError, "elements, not NoneType"),
        (lambda _, bucket: bucket.average(bucket.buffer()).then(lambda _: 1 // 0), RuntimeError, "ZeroDivisionError"),
    ]
    for hook, kind, text in returns:
        peer = DDPPeer(master.address, 0, bucket_bytes=1 << 20)
        peer.module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 2))
        peer.ddp.close()
        peer.ddp = comm_hooks_ddp(peer)
        peer.ddp.register_comm_hook(None, hook)
        peer.enter(1)
        loss(peer.module, 0, 0).backward()
        with pytest.raises(kind, match=text):
            peer.ddp.step()
        close([peer])


def comm_hooks_ddp(peer: DDPPeer) -> Any:
    from pccl.training import DDP

    return DDP(peer.communicator, peer.module, new_optimizer(peer.module))


def test_hooks_are_registered_once_before_join(master: MasterNode) -> None:
    (peer,) = hooked_cluster(master, [(None, comm_hooks.allreduce_hook)])
    assert "register the hook before" in str(refusal(lambda: peer.ddp.register_comm_hook(None, print)))
    close([peer])
    late = DDPPeer(master.address, 0)
    late.ddp.register_comm_hook(None, comm_hooks.allreduce_hook)
    twice = refusal(lambda: late.ddp.register_comm_hook(None, comm_hooks.allreduce_hook))
    assert isinstance(twice, PCCLError)
    assert "a hook is already registered" in str(twice)
    quantized = DDPPeer(master.address, 0, quantization=QuantizationOptions())
    assert "pass the options to bucket.average" in str(refusal(lambda: quantized.ddp.register_comm_hook(None, print)))
    wrong: Any = "fp16"
    with pytest.raises(TypeError, match="hook must be callable, not str"):
        quantized.ddp.register_comm_hook(None, wrong)
