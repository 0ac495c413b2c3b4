"""The optimizer's state as it is at the time: what appears in it later is compared, handed over and saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pccl import Communicator, MasterNode, QuantizationOptions, Result
from pccl.training import DDP, CheckpointError, DiLoCo
from tests.support.cluster import Background, outcomes, results, together
from tests.training.test_ddp_torch import loss, new_module

torch = pytest.importorskip("torch")


class Peer:
    def __init__(self, address: str, number: int, new_optimizer: Callable[[Any], Any], **options: Any) -> None:
        self.number = number
        self.module = new_module()
        self.optimizer = new_optimizer(self.module)
        self.communicator = Communicator(address)
        self.ddp = DDP(
            self.communicator, self.module, self.optimizer, **{"admit_every": 1, "check_every": 1, **options}
        )
        self.digests: dict[int, str] = {}
        self.worlds: list[int] = []

    def enter(self, peers: int = 1) -> Peer:
        self.communicator.connect()
        self.ddp.join(peers)
        return self

    def run(self, until: Callable[[Peer], bool] | int, at: dict[int, Callable[[Peer], None]] | None = None) -> Peer:
        while not until(self) if callable(until) else self.ddp.revision < until:
            (at or {}).get(self.ddp.revision, lambda _: None)(self)
            loss(self.module, self.number, self.ddp.revision).backward()
            self.worlds.append(self.ddp.step().world_size)
            self.digests[self.ddp.revision] = self.ddp.digest()
        return self


def plain(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.05)


def dampened(module: Any) -> Any:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, dampening=0.5)


def of_the_last_layer(module: Any) -> Any:
    return torch.optim.AdamW(module[3].parameters(), lr=0.01)


def with_momentum(peer: Peer) -> None:
    peer.optimizer.param_groups[0]["momentum"] = 0.9


def with_all_layers(peer: Peer) -> None:
    peer.optimizer.add_param_group({"params": list(peer.module[:3].parameters()), "lr": 0.02})


CASES = [(plain, with_momentum), (of_the_last_layer, with_all_layers), (dampened, lambda peer: None)]


@pytest.mark.parametrize(("new_optimizer", "change"), CASES, ids=["momentum", "param group", "dampening"])
def test_newcomers_get_late_state(
    master: MasterNode, new_optimizer: Callable[[Any], Any], change: Callable[[Peer], None]
) -> None:
    peers = [Peer(master.address, number, new_optimizer) for number in range(2)]
    together([partial(peer.enter, 2) for peer in peers])
    together([partial(peer.run, 4, {2: change}) for peer in peers])

    def has_three(peer: Peer) -> bool:
        return peer.worlds[-2:] == [3, 3]

    threads = [Background(partial(peer.run, has_three)) for peer in peers]
    late = Peer(master.address, 2, new_optimizer).enter()
    assert len(late.optimizer.param_groups) == len(peers[0].optimizer.param_groups)
    late.run(has_three)
    for thread in threads:
        thread.result()
    peers.append(late)
    for revision, digest in late.digests.items():
        assert {peer.digests[revision] for peer in peers} == {digest}
    states = [peer.optimizer.state_dict() for peer in peers]
    keys = {(number, key) for number, entries in states[0]["state"].items() for key in entries}
    assert keys
    for state in states[1:]:
        assert state["param_groups"] == states[0]["param_groups"]
        assert all(torch.equal(state["state"][n][key], states[0]["state"][n][key]) for n, key in keys)
    together([peer.communicator.close for peer in peers])


@pytest.mark.parametrize(("new_optimizer", "change"), [CASES[0], CASES[2]], ids=["momentum", "dampening"])
def test_late_state_in_checkpoints(
    tmp_path: Path, new_optimizer: Callable[[Any], Any], change: Callable[[Peer], None]
) -> None:
    digests = []
    with MasterNode("127.0.0.1:0") as master:
        peer = Peer(master.address, 0, new_optimizer).enter().run(3, {1: change})
        peer.ddp.save(tmp_path)
        digests.append(peer.run(5).digests)
        peer.communicator.close()
    with MasterNode("127.0.0.1:0") as master:
        peer = Peer(master.address, 0, new_optimizer)
        assert peer.ddp.load(tmp_path)
        digests.append(peer.enter().run(5).digests)
        peer.communicator.close()
    assert digests[0][5] == digests[1][5]


def adam(module: Any) -> Any:
    return torch.optim.Adam(module.parameters(), lr=0.01)


def adamw(module: Any) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


@pytest.mark.parametrize("kind", [DDP, DiLoCo])
def test_checkpoint_of_other_optimizer_is_refused(tmp_path: Path, kind: Any) -> None:
    """It is refused even where the tensors are alike."""
    communicator = Communicator("127.0.0.1:1")
    trainings = []
    for new_optimizer in (adam, adamw, adam):
        module = new_module()
        trainings.append(kind(communicator, module, new_optimizer(module)))
    trainings[0].save(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"the state of a torch\.optim\.adam\.Adam; the optimizer here is a torch\.optim\.adamw\.A",
    ):
        trainings[1].load(tmp_path)
    assert trainings[2].load(tmp_path)


@pytest.mark.parametrize("kind", [DDP, DiLoCo])
def test_different_optimizers_are_refused(master: MasterNode, kind: Any) -> None:
    def enter(new_optimizer: Callable[[Any], Any]) -> None:
        module = new_module()
        with Communicator(master.address) as communicator:
            kind(communicator, module, new_optimizer(module)).join(2)

    found = outcomes([partial(enter, adam), partial(enter, adamw)])
    assert results(found) == [Result.INVALID_ARGUMENT] * 2
    assert all("=Adam" in str(error) and "=AdamW" in str(error) for error in found)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tag": 50}, "tag=50"),
        ({"buffers": "first"}, "buffers=first"),
        ({"check_every": 2}, "check_every=2"),
        ({"admit_every": 3}, "admit_every=3"),
        ({"bucket_bytes": 64}, "bucket_bytes=64"),
        ({"quantization": QuantizationOptions(bits=8)}, "quantization=QuantizationOptions("),
    ],
)
def test_different_arguments_are_refused(master: MasterNode, options: dict[str, Any], told: str) -> None:
    peers = [Peer(master.address, 0, adam), Peer(master.address, 1, adam, **options)]
    found = outcomes([partial(peer.enter, 2) for peer in peers])
    assert results(found) == [Result.INVALID_ARGUMENT] * 2
    assert all(told in str(error) and "give the same on all peers" in str(error) for error in found)
