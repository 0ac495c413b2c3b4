"""What users do with torch.distributed, as programs of `tests.torch.use.ranks`, which runs them on pccl and on Gloo."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

Values = dict[str, Any]
STEPS = 4


class Network(nn.Module):
    """Three layers; the same weights wherever it is made. `unused` takes part in every other forward pass only."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(7)
            self.first = nn.Linear(12, 33)
            self.second = nn.Linear(33, 17)
            self.norm = nn.BatchNorm1d(17)
            self.unused = nn.Linear(17, 17)
            self.last = nn.Linear(17, 5)
        self.passes = 0

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        hidden = self.norm(torch.relu(self.second(torch.tanh(self.first(values)))))
        return self.last(self.unused(hidden) if self.passes % 2 else hidden)


def plain_network() -> nn.Sequential:
    """Layers without buffers, for what shards parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return nn.Sequential(nn.Linear(12, 33), nn.Tanh(), nn.Linear(33, 18), nn.ReLU(), nn.Linear(18, 5))


def batch(step: int, rank: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's own samples of a step."""
    generator = torch.Generator().manual_seed(1000 * step + (dist.get_rank() if rank is None else rank))
    return torch.randn(16, 12, generator=generator), torch.randn(16, 5, generator=generator)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range = range(STEPS)) -> list[float]:
    losses = []
    for step in steps:
        inputs, targets = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def weights(model: nn.Module) -> Values:
    """All of a model's parameters, whole."""
    values = {}
    for name, parameter in model.named_parameters():
        value = parameter.detach()
        values[name] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return values


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def ddp() -> Values:
    """DDP with unused parameters, buffers to broadcast and gradients that add up; and with uneven inputs under Join."""
    model = DistributedDataParallel(Network(), find_unused_parameters=True, bucket_cap_mb=0.001)
    optimizer = sgd(model)
    losses = train(model, optimizer)
    inputs, targets = batch(90)
    with model.no_sync():
        nn.functional.mse_loss(model(inputs), targets).backward()
    nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    static = DistributedDataParallel(plain_network(), gradient_as_bucket_view=True, static_graph=True)
    static_optimizer = sgd(static)
    train(static, static_optimizer)
    joined = DistributedDataParallel(plain_network())
    joined_optimizer = sgd(joined)
    with Join([joined]):
        train(joined, joined_optimizer, range(2 + dist.get_rank()))
    values: Values = {"losses": losses}
    for name, each in (("plain", model), ("static", static), ("joined", joined)):
        values |= {f"{name} {key}": value for key, value in weights(each).items()}
    return values


def bfloat16_hook(_: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A bucket's average, sent as bfloat16. torch lets its own hook of this kind pass with CUDA only."""
    low = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(low, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))


def ddp_hooks() -> Values:
    """DDP whose gradients travel as bfloat16, as float16, and as PowerSGD's factors."""
    values: Values = {}
    for name, state, hook in (
        ("bf16", None, bfloat16_hook),
        ("fp16", None, default_hooks.fp16_compress_hook),
        ("powersgd", powerSGD_hook.PowerSGDState(None, 2, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook),
    ):
        model = DistributedDataParallel(plain_network())
        model.register_comm_hook(state, hook)
        train(model, sgd(model))
        values |= {f"{name} {key}": value for key, value in weights(model).items()}
    return values


def zero() -> Values:
    """Adam whose state is spread over the ranks, and put together on rank 0."""
    model = DistributedDataParallel(plain_network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer)
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}
    return {**weights(model), "state": {key: dict(value) for key, value in state.items()}}


def sharded(mesh: DeviceMesh, **options: Any) -> nn.Sequential:
    model = plain_network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def fsdp2() -> Values:
    """`fully_shard` over all ranks; gradients clipped; once more with bfloat16 for computing and reducing."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = train(model, optimizer)
    nn.functional.mse_loss(model(batch(50)[0]), batch(50)[1]).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    assert isinstance(norm, DTensor)
    optimizer.step()
    low = sharded(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    train(low, torch.optim.AdamW(low.parameters(), lr=0.01))
    return {
        "losses": losses,
        "norm": norm.full_tensor(),
        **weights(model),
        **{f"low {key}": value for key, value in weights(low).items()},
    }


def hsdp() -> Values:
    """`fully_shard` over a mesh of two dimensions: replicas of shards."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    losses = train(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    return {"losses": losses, **weights(model)}


def dtensor() -> Values:
    """Tensors spread over the ranks in all ways, multiplied, and a network of parallel columns and rows."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(3)
    left, right = torch.randn(4 * size + 1, 6), torch.randn(6, 3 * size)
    rows = distribute_tensor(left, mesh, [Shard(0)])
    columns = distribute_tensor(right, mesh, [Shard(1)])
    values: Values = {
        "product": (rows @ columns.redistribute(mesh, [Replicate()])).full_tensor(),
        "moved": rows.redistribute(mesh, [Shard(1)]).to_local().clone(),
        "inner": (rows.redistribute(mesh, [Shard(1)]) @ columns.redistribute(mesh, [Shard(0)])).full_tensor(),
        "sum": rows.sum().full_tensor(),
        "std": rows.std(dim=0).full_tensor(),
    }
    partial = DTensor.from_local(torch.full((2 * size, 2), float(dist.get_rank() + 1)), mesh, [Partial()])
    values["partial whole"] = partial.full_tensor()
    values["partial shard"] = partial.redistribute(mesh, [Shard(0)]).to_local().clone()
    values["partial max"] = DTensor.from_local(
        torch.arange(4.0) * (-1) ** dist.get_rank(), mesh, [Partial("max")]
    ).full_tensor()
    model = nn.Sequential(nn.Linear(6, 4 * size), nn.GELU(), nn.Linear(4 * size, 3))
    torch.manual_seed(4)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(left).square().mean().backward()
        optimizer.step()
    return {**values, **weights(model)}


def checkpoint() -> Values:
    """A sharded model and its optimizer, saved by all ranks, and loaded into others; then trained on."""
    folder = Path(os.environ["RANKS_FOLDER"]) / f"checkpoint-{dist.get_backend()}"
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)
    saved = weights(model)

    other = sharded(mesh)
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    state, optimizer_state = get_state_dict(other, other_optimizer)
    loaded = {"model": state, "optimizer": optimizer_state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for name, value in weights(other).items():
        assert torch.equal(value, saved[name]), name
    train(other, other_optimizer, range(10, 12))
    train(model, optimizer, range(10, 12))
    trained = weights(model)
    for name, value in weights(other).items():
        assert torch.equal(value, trained[name]), f"{name} after two more steps"
    return trained


def differentiable() -> Values:
    """The collectives through which gradients flow (`torch.distributed.nn.functional`)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    values: Values = {}

    def note(name: str, given: torch.Tensor | tuple[torch.Tensor, ...], leaf: torch.Tensor) -> None:
        given = torch.stack(list(given)) if isinstance(given, tuple | list) else given
        (given * torch.arange(given.numel(), dtype=torch.float32).reshape(given.shape)).sum().backward()
        if rank == 0 or name != "reduce":  # what the others have of it is not defined
            values[name] = given.detach().clone()
        values[f"{name} gradient"] = torch.zeros(()) if leaf.grad is None else leaf.grad.clone()

    def leaf(*shape: int) -> torch.Tensor:
        return (torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 10 * rank).requires_grad_()

    for name, function in (
        ("all_reduce", dist_nn.all_reduce),
        ("all_gather", dist_nn.all_gather),
        ("broadcast", lambda value: dist_nn.broadcast(value, 1)),
        ("reduce", lambda value: dist_nn.reduce(value, 0)),
        ("gather", lambda value: dist_nn.gather(value, 0)),
    ):
        value = leaf(3, 2)
        note(name, function(value), value)
    value = leaf(size, 3)
    note("all_to_all_single", dist_nn.all_to_all_single(torch.empty(size, 3), value), value)
    value = leaf(size, 3)
    note("all_to_all", dist_nn.all_to_all([torch.empty(3) for _ in range(size)], list(value)), value)
    value = leaf(size, 3)
    note("scatter", dist_nn.scatter(list(value), 0), value)
    return values


def objects() -> Values:
    """Whole Python objects of unlike sizes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {"rank": rank, "text": "x" * (100 * rank), "set": {rank, "a"}}
    everybody: list[Any] = [None] * size
    dist.all_gather_object(everybody, mine)
    at_one: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(mine, at_one, dst=1)
    told = [mine, rank] if rank == 1 else [None, None]
    dist.broadcast_object_list(told, src=1)
    part: list[Any] = [None]
    dist.scatter_object_list(part, [{"for": each} for each in range(size)] if rank == 0 else None, src=0)
    letter: list[Any] = [None]
    if rank == 0:
        dist.send_object_list([mine], dst=1)
    elif rank == 1:
        dist.recv_object_list(letter, src=0)
    return {"everybody": everybody, "at one": at_one, "told": told, "part": part, "letter": letter}


def functional() -> Values:
    """Functional collectives, which give new tensors that are waited for when they are used."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    assert group is not None
    mine = torch.arange(2.0 * size).reshape(size, 2) + 100 * rank
    splits = [(rank + each) % 3 for each in range(size)]
    uneven = torch.arange(float(sum(splits))) + 10 * rank
    given = {
        "all_reduce": funcol.all_reduce(mine, "sum", group),
        "average": funcol.all_reduce(mine, "avg", group),
        "maximum": funcol.all_reduce(mine, "max", group),
        "all_gather": funcol.all_gather_tensor(mine, 1, group),
        "reduce_scatter": funcol.reduce_scatter_tensor(mine, "sum", 0, group),
        "all_to_all": funcol.all_to_all_single(mine, None, None, group),
        "uneven": funcol.all_to_all_single(uneven, splits, splits, group),
        "broadcast": funcol.broadcast(mine, 1, group),
    }
    coalesced = funcol.all_reduce_coalesced([mine, mine * 2], "sum", group)
    gathered = funcol.all_gather_into_tensor_coalesced([mine, mine.bfloat16()], group)
    scattered = funcol.reduce_scatter_tensor_coalesced([mine, mine * 3], "sum", [0, 0], group)
    for name, tensors in (("coalesced", coalesced), ("gathered", gathered), ("scattered", scattered)):
        given |= {f"{name} {number}": tensor for number, tensor in enumerate(tensors)}
    return {name: (value + 0).clone() for name, value in given.items()}


def pipeline() -> Values:
    """A pipeline of stages, a rank each, which hand activations and gradients from one to the next."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    stage_module = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
    stage = PipelineStage(stage_module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = sgd(stage_module)
    inputs = batch(0, 0)[0]
    losses: list[torch.Tensor] = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        elif rank == size - 1:
            schedule.step(target=inputs, losses=losses)
        else:
            schedule.step()
        optimizer.step()
    return weights(stage_module)
