"""torchft's fault-tolerant DDP with pccl between the replicas: torchft manages membership, pccl reduces.

    pip install torchft                                # torch 2.7 or newer
    python examples/frameworks/torchft_ddp.py          # three replicas; one is killed, and started again

Each replica is a process with a torchft Manager. Compared with the usual torchft loop, only two lines are pccl's: the
import and the process group. The parent process runs torchft's lighthouse, kills replica 1 with SIGKILL after `--kill`
steps of all replicas together, and restarts it: it fetches the model from another replica and continues with the
others. At the end, all have the same weights.

For several hosts, start `torchft_lighthouse` on one of them and the replicas with its address (`--lighthouse`).
"""

import argparse
import hashlib
import os
import subprocess
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

WIDTH = 64
BATCH = 32
TIMEOUT = timedelta(seconds=30)


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for tensor in model.state_dict().values():
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()[:16]


def train(arguments: argparse.Namespace) -> None:
    """Run one replica from its start to the last step."""
    from torchft import DistributedDataParallel, Manager, Optimizer

    from pccl.torch.torchft import ProcessGroupPCCL

    torch.set_num_threads(1)  # all share this machine's cores
    model = new_model()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupPCCL(TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=arguments.lighthouse,
        replica_id=f"replica_{arguments.replica}_",
        hostname="localhost",
    )
    ddp = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, inner)
    while manager.current_step() < arguments.steps:
        step = manager.current_step()
        generator = torch.Generator().manual_seed(1000 * step + arguments.replica)
        inputs = torch.randn(BATCH, WIDTH, generator=generator)
        optimizer.zero_grad()  # starts the next quorum
        torch.nn.functional.mse_loss(ddp(inputs), inputs.square().sum(1, keepdim=True).sqrt()).backward()
        optimizer.step()  # only if the step's collectives succeeded
        if arguments.replica == 0:
            print(f"step {manager.current_step()} of {manager.num_participants()} replicas", flush=True)
    print(f"replica {arguments.replica} ends with {digest(model)}", flush=True)
    manager.shutdown(wait=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kill", type=int, default=10, metavar="N", help="after this many common steps; 0: never")
    parser.add_argument("--lighthouse", help="address of a lighthouse that is already running")
    parser.add_argument("--replica", type=int, help="run as this replica, not as the parent")
    arguments = parser.parse_args()
    if arguments.replica is not None:
        train(arguments)
        return 0
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=100)
    os.environ.setdefault("RUST_LOG", "warn")  # for torchft, which logs each step
    command = [sys.executable, __file__, "--steps", str(arguments.steps), "--lighthouse", lighthouse.address()]

    def start(replica: int) -> "subprocess.Popen[str]":
        return subprocess.Popen([*command, "--replica", str(replica)], stdout=subprocess.PIPE, text=True)

    replicas = [start(replica) for replica in range(arguments.replicas)]
    watched = replicas[0].stdout
    assert watched is not None
    ends = []
    together = 0
    for line in watched:
        print(line, end="", flush=True)
        together += f" of {arguments.replicas} replicas" in line
        if arguments.kill and together == arguments.kill:
            print("killing replica 1 and restarting it", flush=True)
            replicas[1].kill()
            replicas[1].wait()
            replicas[1] = start(1)
            arguments.kill = 0
        if "ends with" in line:
            ends.append(line.split()[-1])
    for replica in replicas[1:]:
        assert replica.stdout is not None
        ends += [line.split()[-1] for line in replica.stdout if "ends with" in line]
    lighthouse.shutdown()
    print("all replicas end with the same weights" if len(set(ends)) == 1 else f"replicas differ: {ends}")
    return 0 if len(set(ends)) == 1 and len(ends) == arguments.replicas else 1


if __name__ == "__main__":
    sys.exit(main())
