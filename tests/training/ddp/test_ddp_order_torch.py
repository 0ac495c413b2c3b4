"""The order of a program's calls between the backward pass and the step, and the errors of a wrong one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pccl import MasterNode, PCCLError, Result
from pccl.training import DDP
from tests.support.cluster import outcomes, refusal, results, together
from tests.training.test_ddp_torch import (
    DDPPeer,
    assert_parity,
    close,
    cluster_of,
    loss,
    new_module,
    new_optimizer,
    parameters,
)

torch = pytest.importorskip("torch")

ONE_BUCKET = 1 << 20
MAX_NORM = 0.05


def gradients(module: Any) -> Any:
    return torch.cat([p.grad.flatten() for p in module.parameters()])


def clip(module: Any) -> Any:
    return torch.nn.utils.clip_grad_norm_(module.parameters(), MAX_NORM)


def unscale(peer: DDPPeer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    scaler.unscale_(peer.optimizer)


def write_data(peer: DDPPeer) -> None:
    for parameter in peer.module.parameters():
        parameter.grad.data.clamp_(-1e-3, 1e-3)


def write_numpy(peer: DDPPeer) -> None:
    next(peer.module.parameters()).grad.numpy()[0] *= 2


def replace_one(peer: DDPPeer) -> None:
    parameter = next(peer.module.parameters())
    parameter.grad = parameter.grad * 0.5


def set_to_none(peer: DDPPeer) -> None:
    peer.optimizer.zero_grad()


def clip_to_no_effect(peer: DDPPeer) -> None:
    torch.nn.utils.clip_grad_norm_(peer.module.parameters(), 1e9)


WRITES = [lambda peer: clip(peer.module), clip_to_no_effect, unscale, write_data, write_numpy, replace_one, set_to_none]


def backward(peer: DDPPeer, step: int = 0) -> None:
    loss(peer.module, peer.number, step).backward()


def assert_all_refuse(peers: list[DDPPeer], calls: list[Callable[[], Any]], *texts: str) -> list[PCCLError]:
    """All calls fail alike, and no peer has stepped."""
    before = [parameters(peer.module).clone() for peer in peers]
    found: list[PCCLError] = outcomes(calls)
    assert results(found) == [Result.INVALID_USAGE] * len(peers), found
    for error in found:
        assert all(text in str(error) for text in texts), error
    assert all(torch.equal(parameters(peer.module), was) for peer, was in zip(peers, before, strict=True))
    return found


def go_on(peers: list[DDPPeer], steps: int = 2) -> None:
    """The peers train on together."""
    end = peers[0].ddp.revision + steps
    together([partial(peer.run, end) for peer in peers])
    assert_parity(peers)
    assert all(peer.ddp.revision == end for peer in peers)


@pytest.mark.parametrize("bucket_bytes", [1, ONE_BUCKET])
@pytest.mark.parametrize("write", WRITES)
def test_write_in_flight_refuses_step_on_all_peers(
    master: MasterNode, write: Callable[[DDPPeer], object], bucket_bytes: int
) -> None:
    peers = cluster_of(master, 2, bucket_bytes=bucket_bytes)
    number = peers[1].communicator.membership.peers[peers[1].communicator.membership.rank]

    def script(peer: DDPPeer) -> None:
        backward(peer)
        if peer is peers[1]:
            write(peer)
        peer.ddp.step()

    innocent, guilty = assert_all_refuse(peers, [partial(script, peer) for peer in peers], "ddp.synchronize()")
    assert f"peer {number} has changed the gradient of" in str(innocent)
    assert "this peer has changed the gradient of" in str(guilty)
    assert all(float(gradients(peer.module).abs().sum()) == 0 for peer in peers)
    go_on(peers)
    close(peers)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("bucket_bytes", [1, ONE_BUCKET])
def test_clipping_after_synchronize(master: MasterNode, bucket_bytes: int) -> None:
    peers = cluster_of(master, 3, bucket_bytes=bucket_bytes)
    norms: list[list[float]] = [[], [], []]

    def script(peer: DDPPeer) -> None:
        for step in range(4):
            if step % 2:
                peer.optimizer.zero_grad()
            with peer.ddp.no_sync():
                backward(peer, 2 * step)
            backward(peer, 2 * step + 1)
            peer.ddp.synchronize()
            norms[peer.number].append(float(clip(peer.module)))
            peer.ddp.synchronize()
            assert peer.ddp.step().world_size == 3

    together([partial(script, peer) for peer in peers])
    module = new_module()
    optimizer = new_optimizer(module)
    expected = []
    for step in range(4):
        optimizer.zero_grad()
        (sum(loss(module, number, 2 * step + i) for number in range(3) for i in range(2)) / 3).backward()
        expected.append(float(clip(module)))
        optimizer.step()
    assert norms[0] == norms[1] == norms[2] == pytest.approx(expected, rel=1e-4)
    assert len({peer.ddp.digest() for peer in peers}) == 1
    torch.testing.assert_close(parameters(peers[0].module), parameters(module), rtol=1e-4, atol=1e-5)
    close(peers)


def test_optimizer_step_alone_is_refused(master: MasterNode) -> None:
    peers = cluster_of(master, 2)

    def before(peer: DDPPeer) -> None:
        backward(peer)
        peer.optimizer.step()
        peer.ddp.step()

    text = "call ddp.step() instead of optimizer.step()"
    assert_all_refuse(peers, [partial(before, peer) for peer in peers], text)
    together([peer.ddp.step for peer in peers])

    def after(peer: DDPPeer) -> None:
        backward(peer)
        peer.ddp.synchronize()
        peer.optimizer.step()

    assert_all_refuse(peers, [partial(after, peer) for peer in peers], text)

    def with_scaler(peer: DDPPeer) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        scaler.step(peer.optimizer)

    text = "ddp.step(scaler) instead of scaler.step(optimizer)"
    assert_all_refuse(peers, [partial(with_scaler, peer) for peer in peers], text)
    together([peer.ddp.step for peer in peers])
    go_on(peers)
    close(peers)


def test_grad_scaler_skips_on_all_peers(master: MasterNode) -> None:
    peers = cluster_of(master, 3)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in peers]
    overflow = 2
    skipped: list[list[bool]] = [[], [], []]
    scales: list[list[float]] = [[], [], []]

    def script(peer: DDPPeer, scaler: Any) -> None:
        for step in range(5):
            found = loss(peer.module, peer.number, step)
            if step == overflow and peer.number == 1:
                found = found * float("inf")
            scaler.scale(found).backward()
            if step % 2:
                peer.ddp.synchronize()
                scaler.unscale_(peer.optimizer)
                clip(peer.module)
            skipped[peer.number].append(peer.ddp.step(scaler).is_skipped)
            scales[peer.number].append(scaler.get_scale())

    together([partial(script, peer, scaler) for peer, scaler in zip(peers, scalers, strict=True)])
    assert skipped == [[step == overflow for step in range(5)]] * 3
    assert scales == [[1024.0, 2048.0, 1024.0, 1024.0, 2048.0]] * 3
    assert len({peer.ddp.digest() for peer in peers}) == 1
    module = new_module()
    optimizer = new_optimizer(module)
    for step in range(5):
        if step == overflow:
            continue
        optimizer.zero_grad()
        (sum(loss(module, number, step) for number in range(3)) / 3).backward()
        if step % 2:
            clip(module)
        optimizer.step()
    torch.testing.assert_close(parameters(peers[0].module), parameters(module), rtol=1e-4, atol=1e-5)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scalers[0].update()
    close(peers)


@pytest.mark.parametrize("weight", [None, 2.0])
@pytest.mark.parametrize("bucket_bytes", [1, ONE_BUCKET])
def test_failed_backward_abandons_step_on_all_peers(
    master: MasterNode, bucket_bytes: int, weight: float | None
) -> None:
    peers = cluster_of(master, 3, bucket_bytes=bucket_bytes)
    together([partial(peer.run, 2) for peer in peers])
    broken = peers[1]
    number = broken.communicator.membership.peers[broken.communicator.membership.rank]
    for peer in peers if weight else ():
        backward(peer, 2)
    together([partial(peer.ddp.step, weight=weight) for peer in peers if weight])
    before = [parameters(peer.module).clone() for peer in peers]

    def fail(_: Any) -> None:
        raise RuntimeError("out of memory")

    def fails() -> None:
        hook = broken.module[2].weight.register_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            backward(broken, 2)
        hook.remove()
        broken.ddp.abandon()

    def goes_on(peer: DDPPeer) -> None:
        backward(peer, 2)
        peer.ddp.step(weight=weight)

    found = outcomes([fails if peer is broken else partial(goes_on, peer) for peer in peers])
    assert results(found) == [Result.INVALID_USAGE, Result.SUCCESS, Result.INVALID_USAGE]
    for error in (found[0], found[2]):
        assert f"peer {number} has given up the step with ddp.abandon(). No peer has taken this step" in str(error)
    assert all(torch.equal(parameters(peer.module), was) for peer, was in zip(peers, before, strict=True))
    go_on(peers)
    close(peers)


def test_abandon_after_average_is_refused(master: MasterNode) -> None:
    (peer,) = cluster_of(master, 1)
    backward(peer)
    peer.ddp.synchronize()
    assert "to give it up, call ddp.zero_grad() on all peers" in str(refusal(peer.ddp.abandon))
    peer.ddp.zero_grad()
    peer.ddp.abandon()  # before any backward pass
    go_on([peer])
    close([peer])


def test_backward_after_synchronize_is_refused(master: MasterNode) -> None:
    (peer,) = cluster_of(master, 1)
    for context in (peer.ddp.no_sync, lambda: torch.enable_grad()):
        backward(peer)
        peer.ddp.synchronize()
        with pytest.raises(RuntimeError, match=r"after ddp\.synchronize\(\) would add this peer's own"), context():
            backward(peer)
        peer.ddp.zero_grad()
    assert peer.ddp.revision == 0
    peer.run(2)
    close([peer])


def test_zero_grad_after_synchronize_gives_up_step(master: MasterNode) -> None:
    peers = cluster_of(master, 2)

    def script(peer: DDPPeer) -> None:
        for step in range(6):
            backward(peer, step)
            peer.ddp.synchronize()
            if step % 3 == 1:
                peer.ddp.zero_grad()
            else:
                peer.ddp.step()

    together([partial(script, peer) for peer in peers])
    assert [peer.ddp.revision for peer in peers] == [4, 4]
    go_on(peers)
    close(peers)


def test_unfrozen_parameters_refuse_the_step(master: MasterNode) -> None:
    peers = [DDPPeer(master.address, number) for number in range(2)]
    for peer in peers:
        peer.ddp.close()
        peer.module[0].weight.requires_grad_(False)
        peer.ddp = DDP(peer.communicator, peer.module, new_optimizer(peer.module), admit_every=1)
    together([partial(peer.enter, 2) for peer in peers])
    go_on(peers)
    assert all(torch.equal(peer.module[0].weight, new_module()[0].weight) for peer in peers)
    peers[1].module[0].weight.requires_grad_(True)

    def script(peer: DDPPeer) -> None:
        backward(peer)
        peer.ddp.step()

    assert_all_refuse(
        peers, [partial(script, peer) for peer in peers], "has a gradient of '0.weight'", "after unfreezing"
    )
    close(peers)


def test_failed_optimizer_step_ends_the_peer(master: MasterNode) -> None:
    peers = cluster_of(master, 2)
    together([partial(peer.run, 2) for peer in peers])
    stays, broken = peers

    def fail(*_: Any) -> None:
        raise OverflowError("the optimizer is broken")

    broken.optimizer.register_step_post_hook(fail)

    def script() -> None:
        backward(broken, 2)
        with pytest.raises(OverflowError, match="the optimizer is broken"):
            broken.ddp.step()
        with pytest.raises(PCCLError, match=r"failed during a step.*join again") as caught:
            broken.ddp.step()
        assert caught.value.result is Result.INVALID_USAGE
        broken.communicator.close()

    together([script, partial(stays.run, 5)])
    assert stays.worlds[-1] == 1
    close([stays])


def test_moved_module_refuses_the_step(master: MasterNode) -> None:
    peers = cluster_of(master, 2)
    together([partial(peer.run, 2) for peer in peers])
    weight = peers[1].module[2].weight
    weight.data = weight.data.clone()  # as module.to() does

    def script(peer: DDPPeer) -> None:
        backward(peer)
        peer.ddp.step()

    assert_all_refuse(
        peers, [partial(script, peer) for peer in peers], "replaced the replicated tensor 'parameter 2.weight'"
    )
    close(peers)


def test_loaded_optimizer_state_reaches_newcomers(master: MasterNode) -> None:
    peers = [DDPPeer(master.address, number) for number in range(2)]
    module = new_module()
    trained = new_optimizer(module)
    for _ in range(3):
        loss(module, 7, 0).backward()
        trained.step()
    for peer in peers:
        peer.ddp.load_state_dict(module.state_dict())
        peer.optimizer.load_state_dict(trained.state_dict())
    together([partial(peer.enter, 2) for peer in peers])
    together([partial(peer.run, 1) for peer in peers])
    newcomer = DDPPeer(master.address, 2)

    def have_met(peer: DDPPeer) -> bool:
        return peer.worlds.count(3) == 2

    together([*(partial(peer.run, have_met) for peer in peers), lambda: newcomer.enter(1).run(have_met)])
    assert_parity([*peers, newcomer])
    for state in newcomer.optimizer.state.values():
        assert float(state["step"]) == newcomer.ddp.revision + 3
    assert newcomer.optimizer.state[next(newcomer.module.parameters())] is not trained.state
    newcomer.optimizer.load_state_dict(new_optimizer(new_module()).state_dict())
    assert all(float(state["step"]) == 0 for state in newcomer.optimizer.state.values())
    other = torch.optim.AdamW(torch.nn.Linear(2, 2, bias=False).parameters())
    with pytest.raises(ValueError, match="parameter group"):
        newcomer.optimizer.load_state_dict(other.state_dict())
    close([*peers, newcomer])
