"""CUDA tensors: on a GPU where there is one, and the calls that are made of torch where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pccl import Communicator, QuantizationOptions, ReduceOp, SharedState
from pccl.devices.torch_cuda import CudaDevice
from pccl.training import AsyncDiLoCo, DiLoCo
from pccl.training.diloco.diloco import OuterLoop
from tests.support.cluster import Cluster, run_of

torch = pytest.importorskip("torch")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
COUNT = 3_000_017
SUM = ReduceOp.SUM


class Calls:
    """Stands for torch.cuda: notes what is asked of it; copies of CPU tensors happen at once."""

    OutOfMemoryError = torch.cuda.OutOfMemoryError

    def __init__(self) -> None:
        self.made: list[str] = []
        calls = self.made
        self.now = "current"

        class Stream:
            def __init__(self, device: Any = None, name: str = "reads") -> None:
                self.name = name

            def wait_event(self, event: Any) -> None:
                calls.append(f"{self.name} waits for {event.name}")

        class Event:
            def __init__(self, blocking: bool) -> None:
                assert blocking
                self.name = ""

            def record(self, stream: Any) -> None:
                self.name = f"event of {stream.name}"
                calls.append(f"{stream.name} records")

            def synchronize(self) -> None:
                calls.append(f"await {self.name}")

        self.Stream, self.Event = Stream, Event

    def current_stream(self, device: Any) -> Any:
        return self.Stream(device, self.now)

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.now = self.now, stream.name
        yield
        self.now = before

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    def synchronize(self, device: Any) -> None:
        self.made.append("synchronize")


def test_torch_is_asked_for_copies_in_order() -> None:
    api = Calls()

    def empty(size: int, dtype: Any, device: str, pin_memory: bool) -> Any:
        assert pin_memory
        assert device == "cpu"
        return torch.empty(size, dtype=dtype)

    device = CudaDevice(SimpleNamespace(empty=empty, uint8=torch.uint8), api, torch.device("cuda", 3))
    assert device.name == "cuda:3"
    tensor = torch.arange(10.0).view(2, 5)
    memory = device.allocate(64, pinned=True)
    arrived = device.read(tensor, 8, 16, memory, device.mark())
    arrived.wait()
    assert memory.tensor[:16].view(torch.float32).tolist() == [2, 3, 4, 5]
    memory.tensor[:16].view(torch.float32).mul_(10)
    device.follow(device.write(tensor, 20, 16, memory))
    assert tensor.flatten().tolist() == [0, 1, 2, 3, 4, 20, 30, 40, 50, 9]
    assert api.made == [
        "current records",
        "reads waits for event of current",
        "reads records",
        "await event of reads",
        "current records",
        "current waits for event of current",
    ]


@pytest.fixture(scope="module")
def pair() -> Iterator[Cluster]:
    with run_of(2) as cluster:
        yield cluster


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("quantization", [None, QuantizationOptions()])
def test_gpu_tensors_are_reduced_like_those_of_the_cpu(
    pair: Cluster, dtype: Any, quantization: QuantizationOptions | None
) -> None:
    if quantization is not None and not dtype.is_floating_point:
        pytest.skip("only floats are quantized")
    cpu = [(100 * torch.randn(COUNT, generator=torch.Generator().manual_seed(i))).to(dtype) for i in range(2)]
    gpu = [tensor.cuda() for tensor in cpu]
    for held in (cpu, gpu):
        pair.each(lambda peer, i, held=held: peer.all_reduce(held[i], op=SUM, quantization_options=quantization))  # type: ignore[misc]
    for i in range(2):
        assert torch.equal(gpu[i].cpu(), cpu[i])


@needs_gpu
def test_gpu_streams_are_respected(pair: Cluster) -> None:

    def reduce(peer: Communicator, i: int) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(5):
                tensor = torch.zeros(COUNT, device="cuda")
                torch.cuda._sleep(100_000_000)
                tensor.add_(i + turn)
                peer.all_reduce(tensor, op=SUM)
                doubled = 2 * tensor
                assert doubled.min().item() == doubled.max().item() == 2 * (2 * turn + 1)

    pair.each(reduce)


@needs_gpu
def test_gpu_many_ops_at_once(pair: Cluster) -> None:

    def reduce(peer: Communicator, i: int) -> None:
        for turn in range(3):
            held = [torch.full((COUNT,), float(tag + i), device="cuda") for tag in range(4)]
            handles = [peer.all_reduce_async(tensor, op=SUM, tag=tag) for tag, tensor in enumerate(held)]
            for tag, handle in enumerate(handles):
                assert handle.wait()[0]
                assert torch.all(held[tag] == 2 * tag + 1), turn

    pair.each(reduce)


@needs_gpu
def test_gpu_tensors_and_those_of_the_cpu_share_collectives_of_any_size(pair: Cluster) -> None:

    def call(peer: Communicator, _: int) -> None:
        rank = peer.membership.rank
        place = ("cuda", "cpu")[rank]
        ours = [torch.arange(COUNT, dtype=torch.float32).add_(each) for each in range(2)]
        with torch.cuda.stream(torch.cuda.Stream()):
            mine = ours[rank].to(place)
            gathered = peer.all_gather(mine).array
            assert gathered.device.type == place
            assert torch.equal(gathered.cpu(), torch.stack(ours))
            part = peer.reduce_scatter(mine, op=SUM).array
            assert torch.equal(part.cpu(), sum(ours).tensor_split(2)[rank])
            peer.broadcast(mine, root=1)
            assert torch.equal(mine.cpu(), ours[1])
            if rank == 0:
                peer.recv(mine.fill_(0), src=1)
                assert torch.equal(mine.cpu(), ours[1])
            else:
                peer.send(mine, dst=0)

    pair.each(call)
    both = [torch.ones(COUNT, device=place) for place in ("cuda", "cpu")]
    pair.each(lambda peer, i: peer.all_reduce(both[i], op=SUM))
    assert all(bool((tensor == 2).all()) for tensor in both)


@needs_gpu
@pytest.mark.parametrize("loop", [DiLoCo, AsyncDiLoCo])
def test_gpu_and_cpu_models_train_together(loop: type[OuterLoop]) -> None:
    def train(peer: Communicator, i: int) -> str:
        torch.manual_seed(0)
        module = torch.nn.Linear(300, 200).to(("cuda", "cpu")[i])
        optimizer = torch.optim.AdamW(module.parameters())
        trained = loop(peer, module, optimizer)
        trained.join(2)
        for _ in range(3):
            inputs = torch.ones(4, 300, device=module.weight.device)
            module(inputs).pow(2).sum().backward()
            optimizer.step()
            trained.outer_step()
        trained.show_outer()
        shown = torch.nn.utils.parameters_to_vector(module.parameters()).detach().cpu()
        assert torch.equal(shown, torch.from_numpy(trained.outer_parameters.copy()))
        return trained.digest()

    with run_of(2) as cluster:
        assert len(set(cluster.each(train))) == 1


@needs_gpu
def test_gpu_and_cpu_share_a_state(pair: Cluster) -> None:
    tensors = [torch.randn(COUNT, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2)]
    held = [tensors[0].cuda(), tensors[1].clone()]
    for turn in range(1, 4):
        states = [SharedState.from_torch({"x": tensor}) for tensor in held]
        held[turn % 2].add_(1)  # on the GPU still under way when the sync begins
        for i, state in enumerate(states):
            state.revision = 2 * turn + (i == turn % 2)
        pair.each(lambda peer, i, states=states: peer.sync_shared_state(states[i]))  # type: ignore[misc]
        assert torch.equal(held[0].cpu(), held[1])
    infos = pair.each(lambda peer, i: peer.sync_shared_state(states[i]))
    assert [info.rx_bytes for info in infos] == [0, 0]
