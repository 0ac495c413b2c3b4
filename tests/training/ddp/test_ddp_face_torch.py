"""`DDP` used as torch's class is: as a module, under autocast, with layers that are frozen or unused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pccl import Communicator, MasterNode, PCCLError, Result
from pccl.status import run_status
from pccl.training import DDP
from tests.support.cluster import Background, refusal, together, until
from tests.training.test_ddp_torch import DDPPeer, close, cluster_of, loss, new_module, new_optimizer, parameters

torch = pytest.importorskip("torch")


def test_ddp_behaves_like_the_module(master: MasterNode) -> None:
    (peer,) = cluster_of(master, 1)
    ddp, module = peer.ddp, peer.module
    assert ddp.module is module
    inputs = torch.ones(3, 6)
    assert torch.equal(ddp(inputs), module(inputs))
    assert [name for name, _ in ddp.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert all(a is b for a, b in zip(ddp.parameters(), module.parameters(), strict=True))
    assert list(ddp.buffers()) == list(ddp.named_buffers()) == []
    assert next(ddp.modules()) is module
    assert ddp.eval() is ddp
    assert not module.training
    assert not ddp.training
    assert ddp.train() is ddp
    assert module.training
    other = new_module()
    torch.nn.init.ones_(other[0].weight)
    ddp.load_state_dict(other.state_dict())
    assert {name: value.tolist() for name, value in ddp.state_dict().items()} == {
        name: value.tolist() for name, value in other.state_dict().items()
    }
    loss(ddp, 0, 0).backward()
    ddp.step()
    assert not torch.equal(parameters(module), parameters(other))
    close([peer])


def test_loss_tensor_is_reported(master: MasterNode) -> None:
    (peer,) = cluster_of(master, 1)
    found = loss(peer.ddp, 0, 0)
    peer.ddp.report(loss=found)  # which requires grad
    status = until(lambda: seen if (seen := run_status(master.address)).members[0].figures else None, "it is reported")
    assert status.members[0].figures == {"loss": pytest.approx(found.item())}
    assert "must be a number" in refusal(partial(peer.ddp.report, loss=torch.ones(2))).message
    close([peer])


def test_autocast_averages_in_parameter_dtype(master: MasterNode) -> None:
    peers = cluster_of(master, 2)

    def script(peer: DDPPeer) -> None:
        for step in range(3):
            inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(10 * peer.number + step))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                outputs = peer.ddp(inputs)
                assert outputs.dtype is torch.bfloat16
                found = (outputs - inputs[:, :2]).pow(2).mean()
            found.backward()
            peer.ddp.synchronize()
            assert all(p.grad.dtype is torch.float32 for p in peer.ddp.parameters())
            torch.nn.utils.clip_grad_norm_(peer.ddp.parameters(), 0.1)
            assert peer.ddp.step().world_size == 2

    together([partial(script, peer) for peer in peers])
    assert peers[0].ddp.digest() == peers[1].ddp.digest()
    assert not torch.equal(parameters(peers[0].module), parameters(new_module()))
    close(peers)


def test_frozen_and_unused_layers(master: MasterNode) -> None:
    peers = [DDPPeer(master.address, number) for number in range(2)]
    for peer in peers:
        peer.ddp.close()
        peer.module[0].requires_grad_(False)
        peer.optimizer = new_optimizer(peer.module)
        options: dict[str, Any] = {"find_unused_parameters": True, "gradient_as_bucket_view": True}
        peer.ddp = DDP(peer.communicator, peer.module, peer.optimizer, **options)
    together([partial(peer.enter, 2) for peer in peers])

    def script(peer: DDPPeer) -> None:
        for _ in range(3):
            peer.module[2 if peer.number else 3](torch.ones(1, 8 if peer.number else 4)).sum().backward()
            peer.ddp.step()

    together([partial(script, peer) for peer in peers])
    assert peers[0].ddp.digest() == peers[1].ddp.digest()
    start = new_module()
    assert torch.equal(peers[0].module[0].weight, start[0].weight)
    for layer in (2, 3):
        assert not torch.equal(peers[0].module[layer].weight, start[layer].weight)
    close(peers)
    with pytest.raises(ValueError, match="gradients are always views"):
        DDP(Communicator(master.address), start, new_optimizer(start), gradient_as_bucket_view=False)


def test_connect_joins_the_run(master: MasterNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PCCL_MASTER", master.address)
    monkeypatch.setenv("PCCL_LAUNCH_COUNT", "2")

    def script(number: int) -> str:
        torch.manual_seed(0)
        module = torch.nn.Linear(6, 2)
        ddp = DDP.connect(module, new_optimizer(module), admit_every=3)
        for step in range(4):
            loss(ddp, number, step).backward()
            assert ddp.step().world_size == 2
        digest = ddp.digest()
        ddp.close()
        assert not module.weight._post_accumulate_grad_hooks
        return digest

    found = [Background(partial(script, number)) for number in range(2)]
    assert len({each.result() for each in found}) == 1
    monkeypatch.delenv("PCCL_MASTER")
    module = new_module()
    with pytest.raises(PCCLError, match="start the program with pccl launch") as caught:
        DDP.connect(module, new_optimizer(module))
    assert caught.value.result is Result.INVALID_ARGUMENT


def test_connect_resumes_from_a_checkpoint(master: MasterNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PCCL_MASTER", master.address)

    def script(number: int, until: int) -> tuple[int, set[int], str]:
        torch.manual_seed(0)
        module = torch.nn.Linear(6, 2)
        ddp = DDP.connect(module, new_optimizer(module), peers_min=2, load=tmp_path / str(number))
        start, ranks = ddp.revision, set()
        while ddp.revision < until:
            loss(ddp, number, ddp.revision).backward()
            ddp.step()
            ranks.add(ddp.rank)
            ddp.save(tmp_path / str(number))
        digest = ddp.digest()
        ddp.close()
        return start, ranks, digest

    firsts = together([partial(script, number, 3) for number in range(2)])
    assert [start for start, _, _ in firsts] == [0, 0]
    assert sorted(firsts[0][1] | firsts[1][1]) == [0, 1]
    seconds = together([partial(script, number, 5) for number in range(2)])
    assert [start for start, _, _ in seconds] == [3, 3]
    assert seconds[0][2] == seconds[1][2] != firsts[0][2]
    module = new_module()
    with pytest.raises(FileNotFoundError):
        DDP.connect(module, new_optimizer(module), load=tmp_path / "missing.safetensors")


def test_second_connect_of_a_thread_is_refused(master: MasterNode) -> None:
    def connected() -> DDP:
        module = new_module()
        return DDP.connect(module, new_optimizer(module), master.address)

    def script() -> None:
        first = connected()
        with pytest.raises(PCCLError, match="which could never admit this one: close") as refused:
            connected()
        assert refused.value.result is Result.INVALID_USAGE
        first.close()
        connected().close()

    Background(script).result(20.0)


def test_peer_killed_between_backward_and_step(master: MasterNode) -> None:
    peers = cluster_of(master, 3)
    together([partial(peer.run, 2) for peer in peers])
    *others, victim = peers

    def dies() -> None:
        loss(victim.ddp, 2, 2).backward()
        victim.communicator.close()

    together([*(partial(peer.run, 5) for peer in others), dies])
    assert others[0].digests == others[1].digests
    assert others[0].worlds[-1] == 2
    close(others)


def test_optimizer_that_needs_sparse_gradients_is_refused(master: MasterNode) -> None:
    module = torch.nn.Embedding(4, 2, sparse=True)
    with pytest.raises(TypeError, match="SparseAdam needs sparse gradients, which cannot be averaged"):
        DDP(Communicator(master.address), module, torch.optim.SparseAdam(list(module.parameters())))


def test_tracebacks_show_no_inner_frames(master: MasterNode) -> None:
    (peer,) = cluster_of(master, 1, rejoin=False)
    found = loss(peer.ddp, 0, 0)
    peer.communicator.close()

    def frames_of(call: Callable[[], object]) -> list[str]:
        with pytest.raises(PCCLError) as caught:
            call()
        return [entry.name for entry in caught.traceback if "/pccl/" in str(entry.path)]

    assert len(frames_of(found.backward)) <= 2
    for name in ("step", "synchronize", "abandon", "finish"):
        assert len(frames_of(getattr(peer.ddp, name))) <= 2, name
