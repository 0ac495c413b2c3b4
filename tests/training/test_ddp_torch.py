"""Data parallelism with torch: held against one process that has all the data."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pccl import Communicator, MasterNode, PCCLError, QuantizationOptions, Result
from pccl.training import DDP
from pccl.training.ddp.ddp import Step
from tests.support.cluster import Background, together, until

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


def cluster_of(master: MasterNode, count: int, **options: Any) -> list[DDPPeer]:
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


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("bucket_bytes", [1, SMALL_BUCKETS, 1 << 20])
def test_peers_equal_one_process_with_all_data(master: MasterNode, bucket_bytes: int) -> None:
    peers = cluster_of(master, 3, bucket_bytes=bucket_bytes)
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


def conv_peers(master: MasterNode, *formats: Any) -> list[DDP]:
    ddps = []
    for memory_format in formats:
        torch.manual_seed(0)
        module = torch.nn.Conv2d(3, 3, 3).to(memory_format=memory_format)
        communicator = Communicator(master.address)
        ddps.append(DDP(communicator, module, torch.optim.SGD(module.parameters(), lr=0.1)))
    return ddps


def enter(ddp: DDP) -> None:
    ddp._communicator.connect()
    ddp.join(2)


def test_channels_last(master: MasterNode) -> None:
    ddps = conv_peers(master, torch.channels_last, torch.channels_last)
    inputs = torch.arange(2 * 3 * 5 * 5.0).reshape(2, 3, 5, 5) / 100

    def train(number: int) -> None:
        enter(ddps[number])
        for _ in range(2):
            ddps[number](inputs[number : number + 1]).square().mean().backward()
            ddps[number].step()

    together([partial(train, number) for number in range(2)])
    torch.manual_seed(0)
    alone = torch.nn.Conv2d(3, 3, 3)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        alone(inputs).square().mean().backward()
        optimizer.step()
    for ddp in ddps:
        assert ddp.module.weight.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(ddp.module.weight, alone.weight, check_stride=False)
    assert ddps[0].digest() == ddps[1].digest()
    together([ddp._communicator.close for ddp in ddps])


def test_mixed_memory_formats_are_refused(master: MasterNode) -> None:
    """The shapes are equal, and the bytes would mean something else."""
    ddps = conv_peers(master, torch.channels_last, torch.contiguous_format)
    calls = [Background(partial(enter, ddp)) for ddp in ddps]
    until(lambda: any(call.is_over for call in calls), "one is refused")
    refused = next(call for call in calls if call.is_over)
    assert "weight in order [0, 2, 3, 1]" in str(refused.outcome())
    together([ddp._communicator.close for ddp in ddps])
    for call in calls:
        assert isinstance(call.outcome(), PCCLError)


def test_buckets_are_launched_during_backward(master: MasterNode) -> None:
    (peer,) = cluster_of(master, 1)
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


def test_unused_parameters_count_as_zero(master: MasterNode) -> None:
    peers = cluster_of(master, 2)

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


@pytest.mark.usefixtures("place")
def test_layers_frozen_later(master: MasterNode) -> None:
    """Neither moments nor weight decay move them, and they go on when they are thawed."""
    peers = cluster_of(master, 2)
    together([partial(peer.run, 2) for peer in peers])
    weights = [peer.module[0].weight.detach().clone() for peer in peers]
    for peer in peers:
        peer.module[0].requires_grad_(False)
    together([partial(peer.run, 4) for peer in peers])
    for peer, before in zip(peers, weights, strict=True):
        assert torch.equal(peer.module[0].weight, before)
        peer.module[0].requires_grad_(True)
    together([partial(peer.run, 5) for peer in peers])
    for peer, before in zip(peers, weights, strict=True):
        assert not torch.equal(peer.module[0].weight, before)
    assert_parity(peers)
    close(peers)


def test_accumulated_gradients_are_averaged_once(master: MasterNode) -> None:
    peers = cluster_of(master, 2)

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


def test_averaged_model_of_ddp(master: MasterNode) -> None:
    (peer,) = cluster_of(master, 1)
    averaged = torch.optim.swa_utils.AveragedModel(peer.ddp)
    before = [each.detach().clone() for each in peer.module.parameters()]
    averaged.update_parameters(peer.ddp)  # the first one copies
    peer.run(3)
    averaged.update_parameters(peer.ddp)
    for old, new, mean in zip(before, peer.module.parameters(), averaged.parameters(), strict=True):
        torch.testing.assert_close(mean, (old + new) / 2)
    close([peer])


def test_ddp_is_garbage_collected(master: MasterNode) -> None:
    (peer,) = cluster_of(master, 1)
    ended = weakref.ref(peer.ddp), weakref.ref(peer.communicator)
    loss(peer.module, 0, 0).backward()
    close([peer])
    module = peer.module
    del peer
    gc.collect()
    assert [still() for still in ended] == [None, None]
    loss(module, 0, 1).backward()


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("compression", ["8bit", "4bit"])
def test_compressed_gradients(master: MasterNode, compression: Any) -> None:
    peers, plain = cluster_of(master, 3, compression=compression), new_module()
    together([partial(peer.run, 5) for peer in peers])
    assert_parity(peers)
    close(peers)
    others = cluster_of(master, 3)
    together([partial(peer.run, 5) for peer in others])
    error = (parameters(peers[0].module) - parameters(others[0].module)).norm()
    assert 0 < error < 0.4 * (parameters(plain) - parameters(others[0].module)).norm()
    close(others)


@pytest.mark.usefixtures("place")
def test_newcomers_get_optimizer_moments(master: MasterNode) -> None:
    peers = cluster_of(master, 2, quantization=QuantizationOptions())
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


@pytest.mark.usefixtures("place")
def test_peer_lost_between_buckets_is_left_out(master: MasterNode) -> None:
    peers = cluster_of(master, 3)
    leaver = peers.pop()
    threads = [Background(partial(peer.run, 5)) for peer in peers]
    leaver.run(2)
    # Some buckets of the third step are launched, the others never will be.
    with leaver.ddp.no_sync():
        loss(leaver.module, 2, 2).backward()
    for number in range(2):
        leaver.ddp._gradients._launch(number, None, leaver.ddp.revision)
    leaver.communicator.close()
    for thread in threads:
        thread.result()
    assert_parity([*peers, leaver])
    assert peers[0].worlds == [3, 3, 2, 2, 2]
    close(peers)


def test_fresh_optimizer_state() -> None:
    with MasterNode("127.0.0.1:0") as master:
        module = new_module()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.25, weight_decay=0.5, amsgrad=True)
        DDP(Communicator(master.address), module, optimizer).close()
        assert torch.equal(parameters(module), parameters(new_module()))
        assert optimizer.param_groups[0]["lr"] == 0.25
        for state in optimizer.state.values():
            assert all(float(tensor.abs().sum()) == 0 for tensor in state.values())


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "Adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-2),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "ASGD": lambda parameters: torch.optim.ASGD(parameters, lr=1e-2),
    "Rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-2),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, initial_accumulator_value=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_match_torch(master: MasterNode, kind: str) -> None:
    """That includes optimizers whose state does not begin at zero."""
    alone, module = new_module(), new_module()
    optimizers = [OPTIMIZERS[kind](each.parameters()) for each in (alone, module)]
    with Communicator(master.address) as communicator:
        ddp = DDP(communicator, module, optimizers[1])
        ddp.join()
        for step in range(3):
            optimizers[0].zero_grad()
            loss(alone, 0, step).backward()
            optimizers[0].step()
            loss(module, 0, step).backward()
            ddp.step()
        assert torch.equal(parameters(alone), parameters(module))
        ddp.close()


def test_untrainable_modules_are_refused(master: MasterNode) -> None:
    communicator = Communicator(master.address)
    with pytest.raises(ValueError, match="Identity has no parameters that require gradients"):
        DDP(communicator, torch.nn.Identity(), new_optimizer(torch.nn.Linear(1, 1)))
    module = torch.nn.Linear(2, 2)
    optimizer = new_optimizer(module)
    with pytest.raises(TypeError, match=r"must be a torch\.optim\.Optimizer, not NoneType"):
        DDP(communicator, module, None)
    wrong: Any = "int8"
    with pytest.raises(TypeError, match="quantization must be QuantizationOptions or None, not 'int8'"):
        DDP(communicator, module, optimizer, quantization=wrong)
    with pytest.raises(ValueError, match="compression '2bit' sets quantization= itself"):
        DDP(communicator, module, optimizer, compression="2bit", quantization=QuantizationOptions())
    double = torch.nn.Linear(2, 2).double()
    with pytest.raises(ValueError, match=r"needs float32, not torch\.float64"):
        DDP(communicator, double, new_optimizer(double), compression="2bit")
    for name in ("admit_every", "bucket_bytes"):
        with pytest.raises(ValueError, match=f"{name} 0 is not an integer of at least 1"):
            DDP(communicator, module, optimizer, **{name: 0})
    with pytest.raises(PCCLError, match="call join first") as refused:
        DDP(communicator, module, optimizer).step()
    assert refused.value.result is Result.INVALID_USAGE
    module = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(PCCLError, match="'weight' is on meta; only CPU and CUDA") as caught:
        DDP(communicator, module, torch.optim.SGD(module.parameters()))
    assert caught.value.result is Result.INVALID_ARGUMENT
    assert not module.weight._post_accumulate_grad_hooks


def test_sparse_gradients_are_refused(master: MasterNode) -> None:
    with Communicator(master.address) as communicator:
        module = torch.nn.Embedding(10, 3, sparse=True)
        ddp = DDP(communicator, module, torch.optim.SGD(module.parameters()))
        ddp.join()
        with pytest.raises(ValueError, match=r"shape \(10, 3\) is sparse"):
            module(torch.tensor([1])).sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
@pytest.mark.parametrize("places", [("cuda", "cuda"), ("cuda", "cpu")])
def test_gpus_and_cpus_train_together(master: MasterNode, places: tuple[str, str]) -> None:
    peers = [DDPPeer(master.address, number) for number in range(2)]
    for peer, place in zip(peers, places, strict=True):
        peer.module = new_module().to(place)
        peer.ddp = DDP(peer.communicator, peer.module, new_optimizer(peer.module), bucket_bytes=SMALL_BUCKETS)

    def train(peer: DDPPeer, place: str) -> Any:
        peer.enter(2)
        with torch.cuda.stream(torch.cuda.Stream()):
            for step in range(5):
                inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * peer.number + step)).to(
                    place
                )
                (peer.module(inputs) - inputs[:, :2]).pow(2).mean().backward()
                assert peer.ddp.step().world_size == 2
            return parameters(peer.module).cpu()

    first, second = together([partial(train, *pair) for pair in zip(peers, places, strict=True)])
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)
    close(peers)


def test_step_without_backward_warns_once(master: MasterNode, caplog: pytest.LogCaptureFixture) -> None:
    (peer,) = cluster_of(master, 1)
    peer.run(1)
    assert not caplog.records
    peer.ddp.step()
    peer.ddp.step()
    assert [record.levelname for record in caplog.records if "without a backward pass" in record.message] == ["WARNING"]
    assert repr(peer.ddp) == f"DDP({peer.module!r})"
    close([peer])
