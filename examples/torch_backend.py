"""torch.distributed on pccl: a script that also runs on Gloo if the backend's name is changed in one line.

    torchrun --nproc-per-node 2 examples/torch_backend.py
    pccl launch -n 2 examples/torch_backend.py
    torchrun --nproc-per-node 2 examples/torch_backend.py gloo

It trains a small model with torch's own DistributedDataParallel and compares the replicas. With `--lose`, rank 1 exits
in the middle, and the others get an error that names the lost rank.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 20


def main(backend: str, loses: bool) -> None:
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(rank)  # each rank has its own samples
    loss = torch.zeros(())
    for step in range(STEPS):
        if loses and rank == 1 and step == STEPS // 2:
            return  # without notifying the others
        samples = torch.randn(64, 16)
        loss = (model(samples).squeeze(1) - samples.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    losses: list[float | None] = [None] * size
    dist.all_gather_object(losses, loss.item())
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    others = [torch.empty_like(weights) for _ in range(size)]
    dist.all_gather(others, weights)
    are_equal = all(torch.equal(weights, other) for other in others)
    print(f"rank {rank} of {size}: loss {loss.item():.3f}; replicas are {'equal' if are_equal else 'NOT EQUAL'}")
    dist.destroy_process_group()
    if not are_equal:
        sys.exit("the replicas have drifted apart")


if __name__ == "__main__":
    names = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    try:
        main(names[0] if names else "pccl", "--lose" in sys.argv)
    except RuntimeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(3)
