"""SPSA with shared seeds: peers in threads over NumPy arrays and a torch module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, MasterNode
from pccl.devices import torch_cuda
from pccl.signs import add_signs
from pccl.training import SPSA, CheckpointError, LogError, SPSAOptions
from pccl.training.spsa import grid as elements
from tests.support.cluster import Background, together, until
from tests.support.fake_device import FakeDevice
from tests.training.peers import assert_parity, new_model
from tests.training.spsa.spsa_peers import OPTIONS, SPSAPeer, close, distance, each_runs, spsa_cluster


def weights(peer: SPSAPeer) -> bytes:
    return b"".join(np.asarray(array).tobytes() for array in peer.model.values())


class Dealt(SPSAPeer):
    """Deals targets to directions, in place of peers."""

    def loss(self, direction: int = 0) -> float:
        return distance(self.values, 2.0 + direction / 10)


def test_one_peer_equals_many() -> None:
    with MasterNode("127.0.0.1:0") as master:
        peers = [Dealt(master.address, number) for number in range(3)]
        together([partial(peer.enter, 3) for peer in peers])
        first_loss = peers[0].loss()
        each_runs(peers, 60)
        close(peers)
    assert peers[0].worlds == [3] * 60
    with MasterNode("127.0.0.1:0") as master:
        alone = Dealt(master.address, 0, replace(OPTIONS, directions=3)).enter().run(60)
        alone.close()
    assert alone.worlds == [1] * 60
    assert weights(alone) == weights(peers[0])
    assert_parity([alone, *peers])
    assert peers[0].loss() < first_loss / 4


def test_step_sends_one_byte_per_direction(master: MasterNode) -> None:
    peers = spsa_cluster(master, 3, replace(OPTIONS, directions=2), admit_every=100, check_every=100)
    before = peers[0].communicator.stats["tx_payload_bytes"]
    each_runs(peers, 10)
    for peer in peers:
        assert {(step.tx_bytes, step.rx_bytes) for step in peer.steps} == {(4, 4)}  # two for each of two others
    assert peers[0].communicator.stats["tx_payload_bytes"] - before == 40
    close(peers)


@pytest.mark.parametrize("is_on_device", [False, True])
def test_torch_and_numpy_are_bit_identical(
    master: MasterNode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    devices: list[FakeDevice],
    is_on_device: bool,
) -> None:
    torch = pytest.importorskip("torch")
    device = devices[0]
    if is_on_device:
        monkeypatch.setattr(elements, "kind_of_place", lambda _: "cuda")
        monkeypatch.setattr(torch_cuda, "device_of", lambda _: device)

    def new_module() -> Any:
        module = torch.nn.Module()
        for name, array in new_model().items():
            module.register_parameter(name, torch.nn.Parameter(torch.from_numpy(array)))
        return module

    module = new_module()
    pointers = [parameter.data_ptr() for parameter in module.parameters()]
    peers = [SPSAPeer(master.address, 0, model=module), SPSAPeer(master.address, 1)]
    together([partial(peer.enter, 2) for peer in peers])
    each_runs(peers, 20)
    assert_parity(peers)
    for name, array in peers[1].model.items():
        assert peers[0].values[name].detach().numpy().tobytes() == array.tobytes()
    assert [parameter.data_ptr() for parameter in module.parameters()] == pointers
    peers[0].spsa.save(tmp_path / "checkpoint")
    peers[0].communicator.close()
    newcomer = SPSAPeer(master.address, 0, model=new_module())
    newcomer.spsa.load(tmp_path / "checkpoint")
    assert newcomer.spsa.digest() == peers[1].spsa.digest()
    peers[1].run(25)
    thread = Background(partial(peers[1].run, lambda peer: peer.worlds[-3:] == [2, 2, 2]))
    newcomer.enter().run(lambda peer: peer.worlds.count(2) >= 3)
    thread.result()
    assert_parity([newcomer, peers[1]])
    assert (device.reads > 0) == is_on_device
    newcomer.close()
    peers[1].close()


def test_gpus_and_cpus_are_bit_identical(master: MasterNode) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU that torch can use")
    module = torch.nn.Module()
    for name, array in new_model().items():
        module.register_parameter(name, torch.nn.Parameter(torch.from_numpy(array).cuda()))
    peers = [SPSAPeer(master.address, number, model=model) for number, model in enumerate((module, None))]
    together([partial(peer.enter, 2) for peer in peers])
    each_runs(peers, 20)
    assert_parity(peers)
    close(peers)


def have_met_twice(count: int, peer: SPSAPeer) -> bool:
    return peer.worlds.count(count) == 2


three_have_met_twice = partial(have_met_twice, 3)


@pytest.mark.parametrize(
    ("scale", "replay_max", "is_sent"),
    [(1.0, 1000, False), (1.0, 2, True), (3.0, 1000, True)],
    ids=["log", "too far behind", "other weights"],
)
def test_newcomers_get_the_steps_or_the_weights(
    master: MasterNode, scale: float, replay_max: int, is_sent: bool
) -> None:
    peers = spsa_cluster(master, 2, replay_max=replay_max)
    each_runs(peers, 20)
    newcomer = SPSAPeer(master.address, 2, replay_max=replay_max)
    for array in newcomer.model.values():
        array *= np.float32(scale)
    threads = [Background(partial(peer.run, three_have_met_twice)) for peer in peers]
    newcomer.enter().run(three_have_met_twice)
    for thread in threads:
        thread.result()
    joined_at = min(newcomer.digests)
    assert joined_at >= 20
    assert (newcomer.admission.rx_bytes > 0) == is_sent
    assert set(newcomer.digests) == {joined_at, joined_at + 1, joined_at + 2}
    assert_parity([*peers, newcomer])
    assert [step.revision for step in peers[0].steps if step.admitted] == [joined_at]
    close([*peers, newcomer])


def test_peer_lost_during_exchange_is_left_out(master: MasterNode) -> None:
    peers = spsa_cluster(master, 3)
    leaver = peers.pop(0)
    threads = [Background(partial(peer.run, 5)) for peer in peers]
    leaver.run(2)
    until(lambda: all(peer.communicator.stats["ops_open"] for peer in peers), "the others are in the third exchange")
    leaver.close()
    for thread in threads:
        thread.result()
    assert_parity([*peers, leaver])
    for peer in peers:
        assert peer.worlds == [3, 3, 2, 2, 2]
    close(peers)


def replayed(path: Path, until_end: int, options: SPSAOptions = OPTIONS, scale: float = 1.0) -> str:
    """Return the digest that a peer without a network makes of a log."""
    model = new_model()
    for array in model.values():
        array *= np.float32(scale)
    spsa = SPSA(Communicator("127.0.0.1:1"), model, options, admit_every=1)
    assert spsa.replay(path) == until_end
    return spsa.digest()


def test_log_replays_the_run(master: MasterNode, tmp_path: Path) -> None:
    """Through a loss and a join."""
    path = tmp_path / "log"
    keeper = SPSAPeer(master.address, 0, log=path)
    others = [SPSAPeer(master.address, number) for number in (1, 2)]
    together([partial(peer.enter, 3) for peer in (keeper, *others)])
    each_runs([keeper, *others], 4)
    others.pop(0).close()
    each_runs([keeper, *others], 8)
    newcomer = SPSAPeer(master.address, 4)
    threads = [Background(partial(peer.run, 20)) for peer in (keeper, *others)]
    newcomer.enter().run(20)
    for thread in threads:
        thread.result()
    assert {1, 2, 3} & set(keeper.worlds) == {2, 3}
    assert replayed(path, 20) == keeper.digest()
    close([keeper, *others, newcomer])
    assert replayed(path, 20) == keeper.digest()
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])  # the last mark, in part
    assert replayed(path, 20) == keeper.digest()
    with pytest.raises(LogError, match="different weights at revision 0, after 0"):
        replayed(path, 20, scale=1.5)
    with pytest.raises(LogError, match="from another run"):
        replayed(path, 20, replace(OPTIONS, learning_rate=0.2))
    path.write_bytes(whole[:300] + bytes([whole[300] ^ 1]) + whole[301:])
    with pytest.raises(LogError, match=r"damaged|is invalid"):
        replayed(path, 20)
    path.write_bytes(b"something else")
    with pytest.raises(LogError, match="not a log"):
        replayed(path, 20)
    with pytest.raises(LogError, match="not a log"):
        SPSAPeer(master.address, 0, log=path)


def test_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    with MasterNode("127.0.0.1:0") as master:
        first = spsa_cluster(master, 2, target=1.0)
        each_runs(first, 4)
        first[0].spsa.save(path)
        each_runs(first, 6)
        close(first)
    with MasterNode("127.0.0.1:0") as master:
        second = [SPSAPeer(master.address, number, target=1.0) for number in range(2)]
        second[0].spsa.load(path)  # the other gets it
        together([partial(peer.enter, 2) for peer in second])
        each_runs(second, 6)
        close(second)
        assert_parity([*first, *second])
        assert sorted(second[1].digests) == [4, 5, 6]
        with pytest.raises(CheckpointError, match="another run"):
            SPSAPeer(master.address, 0, replace(OPTIONS, seed=1)).spsa.load(path)


def test_exception_in_loss_keeps_weights(master: MasterNode) -> None:
    peer = SPSAPeer(master.address, 0).enter().run(3)
    other = SPSAPeer(master.address, 0)  # not connected; for its loss

    def broken(at: int, value: float | None) -> Callable[[int], float]:
        calls = iter(range(10))

        def loss(direction: int) -> float:
            if next(calls) == at:
                if value is None:
                    raise KeyboardInterrupt
                return value
            return other.loss(direction)

        return loss

    before = weights(peer)
    for at in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            peer.spsa.step(broken(at, None))
        assert weights(peer) == before
        with pytest.raises(FloatingPointError, match=r"nan|inf"):
            peer.spsa.step(broken(at, float("nan" if at else "inf")))
        assert weights(peer) == before
    peer.run(5)
    with MasterNode("127.0.0.1:0") as elsewhere:
        undisturbed = SPSAPeer(elsewhere.address, 0).enter().run(5)
        undisturbed.close()
    assert_parity([peer, undisturbed])
    peer.close()


def test_interrupted_move_needs_rejoin(master: MasterNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = spsa_cluster(master, 2)
    each_runs(peers, 3)
    peers[0].spsa.save(tmp_path / "checkpoint")
    calls = iter(range(100))

    def interrupted(*arguments: Any, **others: Any) -> None:
        if next(calls) == 1:  # between two tensors
            raise KeyboardInterrupt
        add_signs(*arguments, **others)

    with monkeypatch.context() as patched:
        patched.setattr("pccl.training.spsa.grid.add_signs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            peers[0].step()
    for use in (peers[0].step, peers[0].spsa.digest, partial(peers[0].spsa.save, tmp_path / "torn")):
        with pytest.raises(RuntimeError, match="interrupted"):
            use()
    peers[0].communicator.close()
    thread = Background(partial(peers[1].run, lambda peer: peer.worlds.count(2) == 5))
    again = peers[0].communicator = Communicator(master.address)
    again.connect()
    peers[0].spsa.reconnect(again)
    peers[0].run(lambda peer: peer.worlds.count(2) == 5)
    thread.result()
    assert_parity(peers)
    close(peers)


def test_invalid_arguments_are_refused() -> None:
    communicator = Communicator("127.0.0.1:1")
    wrong: Any = 1e-3
    with pytest.raises(TypeError, match=r"options must be SPSAOptions, not 0\.001"):
        SPSA(communicator, new_model(), wrong)
    with pytest.raises(ValueError, match="admit_every 0 is not an integer of at least 1"):
        SPSA(communicator, new_model(), OPTIONS, admit_every=0)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"w": np.zeros(3)}, "'w' is float64; only contiguous float32"),
        ({"w": np.zeros((4, 4), np.float32).T[:2]}, "not contiguous"),
        ({"w": np.full(3, np.nan, np.float32)}, "not finite"),
        ({}, "no parameters"),
    ],
)
def test_untrainable_models_are_refused(model: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        SPSA(Communicator("127.0.0.1:1"), model, OPTIONS)


@pytest.mark.parametrize(
    "wrong",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"epsilon": float("inf")},
        {"decay_steps": 0},
        {"directions": 0},
        {"seed": -1},
        {"unit": -1.0},
    ],
)
def test_invalid_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must|is not an integer in"):
        SPSAOptions(**{"learning_rate": 1e-3} | wrong)
