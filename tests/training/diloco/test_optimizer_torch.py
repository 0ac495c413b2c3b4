"""DiLoCo as a torch optimizer: what schedulers, scalers and trainers do with one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pccl import Communicator, MasterNode, PCCLError
from pccl.training import AsyncDiLoCo, DiLoCo, DiLoCoOptimizer, OuterStep
from tests.support.cluster import Background, evict, together
from tests.training.test_torch import INNER_STEPS, TorchPeer, inner_steps, new_module, new_optimizer, parameters

torch = pytest.importorskip("torch")


class Trained:
    """A peer with an ordinary optimizer loop."""

    def __init__(self, address: str, number: int, kind: Any = DiLoCo, peers_min: int = 2, **options: Any) -> None:
        self.number = number
        self.module = new_module()
        self.communicator = Communicator(address)
        self.steps: list[OuterStep] = []
        weighted = options.pop("weighted", False)
        diloco = kind(self.communicator, self.module, new_optimizer(self.module), **options)
        self.optimizer: Any = DiLoCoOptimizer(
            diloco, peers_min=peers_min, weighted=weighted, on_outer_step=self.steps.append
        )
        self.made = 0

    @property
    def digest(self) -> str:
        return str(self.optimizer.diloco.digest())

    def train(self, count: int = 1) -> None:
        """Make `count` times as many inner steps as the loops without this class make in an outer one."""
        for _ in range(count):
            inner_steps(self.module, self.optimizer, self.number, self.made)
            self.made += 1

    def close(self) -> None:
        self.communicator.close()


def cluster_of(master: MasterNode, count: int = 2, kind: Any = DiLoCo, **options: Any) -> list[Trained]:
    options = {"inner_steps": INNER_STEPS, "peers_min": count, **options}
    return [Trained(master.address, number, kind, **options) for number in range(count)]


def close(peers: Sequence[Any]) -> None:
    together([peer.close for peer in peers])


@pytest.fixture
def alone(master: MasterNode) -> Any:
    peer = Trained(master.address, 0, peers_min=1, inner_steps=INNER_STEPS)
    yield peer
    peer.close()


def test_evicted_peer_rejoins(master: MasterNode, alone: Trained) -> None:
    alone.train(2)
    inner_steps(alone.module, alone.optimizer.inner, 0, 2)
    evict(master, alone.communicator)
    alone.train(2)
    assert [step.rejoined for step in alone.steps] == [False, False, True, False]
    assert [step.revision for step in alone.steps] == [1, 2, 2, 3]


def test_optimizer_equals_explicit_loop(master: MasterNode) -> None:
    peers = cluster_of(master)
    together([partial(peer.train, 3) for peer in peers])
    with MasterNode("127.0.0.1:0") as other:
        plain = [TorchPeer(other.address, number) for number in range(2)]
        together([partial(peer.enter, 2) for peer in plain])
        together([partial(peer.run, 3) for peer in plain])
        together([peer.communicator.close for peer in plain])
    assert {peer.digest for peer in peers} == {peer.diloco.digest() for peer in plain}
    for peer in peers:
        assert [step.world_size for step in peer.steps] == [2] * 3
        assert torch.equal(parameters(peer.module), parameters(plain[0].module))
    close(peers)


def test_optimizer_follows_the_overlap(master: MasterNode) -> None:
    peers = cluster_of(master, kind=AsyncDiLoCo, overlap=1)
    together([partial(peer.train, 3) for peer in peers])
    for peer in peers:
        assert [step.world_size for step in peer.steps] == [
            0,
            2,
        ] * 3  # launched after three of four steps, then applied
        assert peer.optimizer.revision == 3
    close(peers)


def test_is_a_torch_optimizer(alone: Any) -> None:
    optimizer, inner = alone.optimizer, alone.optimizer.inner
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(optimizer, DiLoCoOptimizer)
    assert not issubclass(DiLoCoOptimizer, torch.optim.Optimizer)
    assert type(optimizer) is type(Trained("127.0.0.1:1", 0).optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.state is inner.state
    assert optimizer.defaults is inner.defaults
    assert "DiLoCo every 4 steps of AdamW" in repr(optimizer)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)


def test_schedulers(alone: Any, recwarn: pytest.WarningsRecorder) -> None:
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(alone.optimizer, T_max=10)
    rates = []
    for _ in range(3):
        alone.train()
        scheduler.step()
        rates.append(alone.optimizer.inner.param_groups[0]["lr"])
    assert rates == sorted(rates, reverse=True)
    assert rates[0] < 1e-2
    assert not recwarn.list
    torch.optim.lr_scheduler.ReduceLROnPlateau(alone.optimizer).step(1.0)
    torch.optim.lr_scheduler.OneCycleLR(alone.optimizer, 0.1, total_steps=10).step()


@pytest.mark.parametrize("is_weighted", [False, True])
def test_different_initial_weights(master: MasterNode, is_weighted: bool) -> None:
    class Beginner:
        def __init__(self, number: int) -> None:
            self.number = number
            self.module = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
            torch.nn.init.constant_(self.module[0].weight, number + 1.0)
            inner = torch.optim.SGD(self.module.parameters(), lr=0.1)
            self.communicator = Communicator(master.address)
            self.diloco = DiLoCo(self.communicator, self.module, inner, inner_steps=3, check_every=1)
            self.optimizer: Any = DiLoCoOptimizer(self.diloco, peers_min=2, weighted=is_weighted)
            self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
            self.diloco.share({"scheduler": self.scheduler})

        def train(self) -> str:
            for _ in range(7):
                self.optimizer.zero_grad()
                self.module(torch.arange(24.0).view(4, 6).cos() + self.number).pow(2).sum().backward()
                if is_weighted:
                    self.optimizer.count(4.0)
                self.optimizer.step()
                self.scheduler.step()
            assert self.optimizer.revision == 2
            return self.diloco.digest()

        def close(self) -> None:
            self.communicator.close()

    peers = [Beginner(number) for number in range(2)]
    assert len(set(together([peer.train for peer in peers]))) == 1
    close(peers)


def test_newcomers_get_learning_rate(master: MasterNode) -> None:
    def new_peer(number: int) -> tuple[Trained, Any]:
        peer = Trained(master.address, number, peers_min=1, inner_steps=INNER_STEPS, check_every=1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(peer.optimizer, 0.9)
        peer.optimizer.diloco.share({"scheduler": scheduler})
        return peer, scheduler

    def step(peer: Trained, scheduler: Any) -> None:
        peer.optimizer.zero_grad()
        peer.module(torch.ones(4, 6)).pow(2).mean().backward()
        peer.optimizer.step()
        scheduler.step()

    def run(peer: Trained, scheduler: Any) -> None:
        while not any(each.admitted for each in peer.steps):
            step(peer, scheduler)
        for _ in range(2 * INNER_STEPS):
            step(peer, scheduler)

    def enter(newcomer: Trained, scheduler: Any) -> list[float]:
        rates = []
        newcomer.optimizer.join()
        for _ in range(2 * INNER_STEPS):
            rates.append(newcomer.optimizer.param_groups[0]["lr"])
            step(newcomer, scheduler)
        return rates

    first, second = new_peer(0), new_peer(1)
    for _ in range(3 * INNER_STEPS):
        step(*first)
    thread = Background(partial(run, *first))
    rates = enter(*second)
    thread.result()
    assert rates[0] < 1e-2 * 0.9**10
    assert first[0].optimizer.param_groups[0]["lr"] == second[0].optimizer.param_groups[0]["lr"]
    assert first[1].state_dict() == second[1].state_dict()
    assert first[0].digest == second[0].digest
    with pytest.raises(PCCLError, match="call share before"):
        first[0].optimizer.diloco.share({})
    close([first[0], second[0]])


def test_steps_skipped_by_scaler_do_not_count(master: MasterNode) -> None:
    peers = cluster_of(master)

    def train(peer: Trained) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        steps = 0
        while peer.optimizer.revision < 3:
            peer.optimizer.zero_grad()
            loss = peer.module(torch.ones(4, 6)).pow(2).mean()
            scaler.scale(loss).backward()
            if peer.number == 1 and steps in (1, 2, 9):
                next(peer.module.parameters()).grad[0, 0] = float("inf")
            scaler.step(peer.optimizer)
            scaler.update()
            steps += 1
        peer.made = steps

    together([partial(train, peer) for peer in peers])
    assert [peer.made for peer in peers] == [3 * INNER_STEPS, 3 * INNER_STEPS + 3]
    assert peers[0].digest == peers[1].digest
    assert torch.equal(parameters(peers[0].module), parameters(peers[1].module))
    close(peers)


def test_closures(alone: Any) -> None:
    calls = []

    def closure() -> Any:
        calls.append(alone.optimizer.diloco.has_joined)
        alone.optimizer.zero_grad()
        loss = alone.module(torch.ones(4, 6)).pow(2).mean()
        loss.backward()
        return loss

    losses = [float(alone.optimizer.step(closure).detach()) for _ in range(2 * INNER_STEPS)]
    assert losses[0] > losses[1]
    assert calls == [True] * len(losses)
    assert alone.optimizer.revision == 2


def test_resume_from_state_dict(tmp_path: Path) -> None:
    def run_of(master: MasterNode, steps: int, start: Sequence[Any] = ()) -> list[Trained]:
        peers = cluster_of(master)
        for peer, state in zip(peers, start, strict=False):
            peer.optimizer.load_state_dict(state)
            peer.made = peer.optimizer.revision
        together([partial(peer.train, steps) for peer in peers])
        close(peers)
        return peers

    with MasterNode("127.0.0.1:0") as master:
        whole = run_of(master, 4)
    with MasterNode("127.0.0.1:0") as master:
        first = run_of(master, 2)
    for peer in first:
        torch.save(peer.optimizer.state_dict(), tmp_path / f"{peer.number}.pt")
    states = [torch.load(tmp_path / f"{peer.number}.pt", weights_only=True) for peer in first]
    with MasterNode("127.0.0.1:0") as master:
        second = run_of(master, 2, states)
    assert second[0].optimizer.revision == 4
    assert second[0].digest == second[1].digest == whole[0].digest


def test_load_state_dict_after_join(alone: Any) -> None:
    before = copy.deepcopy(alone.optimizer.state_dict())
    alone.optimizer.load_state_dict(alone.optimizer.state_dict())  # as Accelerate does
    alone.train()
    digest = alone.digest
    alone.optimizer.load_state_dict(alone.optimizer.state_dict())
    with pytest.raises(ValueError, match=r"revision 0, .* before the first step"):
        alone.optimizer.load_state_dict(before)
    assert alone.digest == digest
    alone.train()
    assert alone.optimizer.revision == 2
    other = torch.nn.Linear(3, 3)
    small = DiLoCoOptimizer(DiLoCo(Communicator("127.0.0.1:1"), other, new_optimizer(other)))
    with pytest.raises(ValueError, match="another model: 74 parameters, not 12"):
        small.load_state_dict(before)


def test_weights_and_speeds(master: MasterNode) -> None:
    peers = cluster_of(master, 2, steps="by speed", weighted=True)
    clocks = [0.0, 0.0]

    def train(peer: Trained) -> int:
        pace = peer.optimizer.diloco._inner_steps
        pace.clock = lambda: clocks[peer.number]
        peer.optimizer.join()
        made = 0
        while peer.optimizer.revision < 4:
            peer.optimizer.zero_grad()
            peer.module(torch.ones(4, 6)).pow(2).mean().backward()
            peer.optimizer.count(4)
            clocks[peer.number] += (1.0, 4.0)[peer.number]
            peer.optimizer.step()
            made += 1
        return made

    assert together([partial(train, peer) for peer in peers]) == [4 + 3 * 4, 4 + 3 * 1]
    assert peers[0].digest == peers[1].digest
    with pytest.raises(ValueError, match="weighted=True"):
        Trained("127.0.0.1:1", 0).optimizer.count(1)
    close(peers)


def test_unaveraged_parameters_are_refused(master: MasterNode) -> None:
    module, stranger = new_module(), torch.nn.Linear(2, 2)
    communicator = Communicator(master.address)
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, not NoneType"):
        DiLoCoOptimizer(DiLoCo(communicator, module))
    with pytest.raises(ValueError, match=r"a parameter of shape \(2, 2\) .* would not be averaged"):
        DiLoCoOptimizer(DiLoCo(communicator, module, new_optimizer(stranger)))
    inner = torch.optim.SGD(module[0].parameters(), lr=0.1)
    optimizer = DiLoCoOptimizer(DiLoCo(communicator, module, inner))
    with pytest.raises(ValueError, match="would not be averaged"):
        optimizer.add_param_group({"params": stranger.parameters()})
    optimizer.add_param_group({"params": list(module[2].parameters()), "lr": 0.2})
    assert [group["lr"] for group in inner.param_groups] == [0.1, 0.2]
