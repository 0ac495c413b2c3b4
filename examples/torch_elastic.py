"""Training that survives the loss of ranks and admits new ones, with torch's own DDP or FSDP2 on pccl.

    python examples/torch_elastic.py
    python examples/torch_elastic.py --loop fsdp --kill 0@60 --join 100

It starts `--peers` workers and a spare one, kills a worker with SIGKILL (`--kill WORKER@STEP`), and lets the spare one
join (`--join STEP`). The collective in flight fails on the other workers with an error that names the lost rank and the
reason; then a reconfigure forms a group from the survivors, in the same processes. torch 2.15 has functions for this,
such as `dist._reconfigure`; pccl's process groups have the methods also with older versions of torch.

With DDP, every worker holds the whole model, so the survivors continue with the interrupted step. With FSDP2, a lost
rank's shards are lost, so all ranks return to the last checkpoint (`torch.distributed.checkpoint`), which any number of
ranks can read.

A real program has to provide `Members` and `Conductor`, which give all workers the membership in the same order. Here
the membership is in a store in the parent process; it may also come from a scheduler, etcd, or torchft's lighthouse.
"""

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import pccl.torch  # noqa: F401  # registers the backend

WIDTH = 64
BATCH = 32
SAVE_EVERY = 5
LIMIT = timedelta(seconds=60)
PROCESS = f"{socket.gethostname()}:{os.getpid()}"
"""The name of this process in errors."""
RETRY_S = 3.0
"""Seconds after which the same workers form another world if they cannot continue in the last one."""


def say(event: str, **facts: Any) -> None:
    """Print an event as one line of JSON."""
    line = json.dumps({"event": event, "at": round(time.time(), 3), **facts})
    print(f"{line}\n", end="", flush=True)  # in one write, since several processes share the output


class Members:
    """A worker's successive worlds."""

    def __init__(self, store: dist.Store, worker: int) -> None:
        self._store = store
        self._worker = worker
        self.uuid = 0

    def announce(self, handle: str) -> None:
        self._handle = handle
        self._store.set(f"handle/{self._worker}", handle)

    def reached(self, step: int) -> None:
        self._store.set(f"step/{self._worker}", str(step))

    def is_broken(self) -> None:
        """Report that this worker cannot continue in its world."""
        self._store.set(f"broken/{self._worker}", str(self.uuid))

    def newest(self) -> int:
        return int(self._store.get("newest"))

    def next_world(self) -> list[str]:
        """Wait for a newer world that includes this worker, and return the handles of its ranks."""
        while True:
            self._store.wait([f"world/{self.uuid + 1}"], LIMIT)
            self.uuid = max(self.uuid + 1, self.newest())  # published after the world itself
            handles: list[str] = json.loads(self._store.get(f"world/{self.uuid}"))
            if self._handle in handles:
                return handles


def reconfigure(uuid: int, handles: list[str]) -> None:
    """Form the default group from the processes with these handles."""
    timeout = timedelta(seconds=20)
    if hasattr(dist, "_reconfigure"):
        dist._reconfigure(uuid, handles, timeout=timeout).wait()
    else:
        options = SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints={})
        dist.distributed_c10d._get_default_group().reconfigure(options).wait()


def new_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(WIDTH, 1))


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    return inputs, inputs.square().sum(1, keepdim=True).sqrt()


class DDPLoop:
    """Every rank holds the whole model; newcomers receive it from rank 0, which is never a newcomer."""

    def __init__(self) -> None:
        self.step = 0
        self._model = new_model()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-3)

    def enter(self) -> None:
        """Begin in a new world."""
        state = [self.step, self._optimizer.state_dict()]
        dist.broadcast_object_list(state, group_src=0)
        self.step = state[0]
        self._optimizer.load_state_dict(state[1])
        self.model: torch.nn.Module = DistributedDataParallel(self._model)  # sends rank 0's parameters to all

    def train(self) -> None:
        self._optimizer.zero_grad()
        inputs, wanted = batch(self.step, dist.get_rank())
        torch.nn.functional.mse_loss(self.model(inputs), wanted).backward()
        self._optimizer.step()
        self.step += 1

    def digest(self) -> str:
        found = hashlib.sha256()
        for tensor in self._model.state_dict().values():
            found.update(tensor.numpy().tobytes())
        return found.hexdigest()[:16]

    survivor_digest = digest
    """A digest that must be equal on all survivors of a loss before they communicate again."""


class FSDPLoop:
    """Every rank has a shard; after a loss, all ranks return to the last checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.step = 0
        self._folder = folder

    def enter(self) -> None:
        """Begin in a new world."""
        self.model = new_model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        newest = max((int(path.parent.name) for path in self._folder.glob("*/complete")), default=0)
        steps = torch.tensor([newest])
        dist.broadcast(steps, group_src=0)  # rank 0 looks at the folder for all
        self.step = int(steps)
        if self.step:
            state = self._state()
            dcp.load({"train": state}, checkpoint_id=self._folder / str(self.step))
            set_state_dict(
                self.model, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def train(self) -> None:
        self._optimizer.zero_grad()
        inputs, wanted = batch(self.step, dist.get_rank())
        torch.nn.functional.mse_loss(self.model(inputs), wanted).backward()
        self._optimizer.step()
        self.step += 1
        if self.step % SAVE_EVERY == 0:
            folder = self._folder / str(self.step)
            dcp.save({"train": self._state()}, checkpoint_id=folder)
            if dist.get_rank() == 0:
                (folder / "complete").touch()

    def digest(self) -> str:
        found = hashlib.sha256()
        for parameter in self.model.parameters():
            whole = parameter.full_tensor()  # gathered from a DTensor
            found.update(whole.detach().numpy().tobytes())
        return found.hexdigest()[:16]

    def survivor_digest(self) -> str:
        """Shards differ from rank to rank, so only the step can be compared."""
        return ""


def work(arguments: argparse.Namespace) -> None:
    """Run one worker from its start to the last step."""
    torch.set_num_threads(1)  # all share this machine's cores
    host, _, port = arguments.store.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, timeout=LIMIT)
    # The group has one rank until the first reconfigure.
    dist.init_process_group("pccl", store=dist.HashStore(), rank=0, world_size=1, timeout=LIMIT)
    members = Members(store, arguments.worker)
    loop = DDPLoop() if arguments.loop == "ddp" else FSDPLoop(arguments.folder)
    # This comes after all slow preparations, because the others wait for an announced worker.
    members.announce(dist.distributed_c10d._get_default_group().get_reconfigure_handle())
    while loop.step < arguments.steps:
        handles = members.next_world()
        try:
            began = time.monotonic()
            reconfigure(members.uuid, handles)
            took = time.monotonic() - began
            loop.enter()
            facts = {"rank": dist.get_rank(), "size": len(handles), "step": loop.step, "seconds": round(took, 3)}
            say("world", worker=arguments.worker, process=PROCESS, uuid=members.uuid, **facts)
            run_steps(loop, members, arguments)
        except RuntimeError as error:  # a loss, a timeout or another failure: a new world follows
            members.is_broken()
            facts = {"step": loop.step, "why": str(error), "digest": loop.survivor_digest()}
            say("lost", worker=arguments.worker, uuid=members.uuid, **facts)
    say("done", worker=arguments.worker, step=loop.step, digest=loop.digest())
    dist.barrier()
    dist.destroy_process_group()


def run_steps(loop: DDPLoop | FSDPLoop, members: Members, arguments: argparse.Namespace) -> None:
    """Train until the last step, or until there is a newer world, because newcomers wait for it."""
    while loop.step < arguments.steps:
        loop.train()
        time.sleep(arguments.pace)
        members.reached(loop.step)
        newest = torch.tensor([members.newest()])
        dist.all_reduce(newest, dist.ReduceOp.MAX)  # so that all leave this world after the same step
        if int(newest) > members.uuid:
            return


class Conductor:
    """The parent process, which starts workers, kills one, and publishes the members."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=LIMIT)
        self._store.set("newest", "0")
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._handles: dict[int, str] = {}
        """Handles of live workers that have announced themselves."""
        self._uuid = 0

    def run(self) -> int:
        """Return 0 if all workers except the killed one have reached the last step."""
        arguments = self._arguments
        victim, _, kill_at = arguments.kill.partition("@")
        to_kill, join_at = victim, arguments.join
        for worker in range(arguments.peers + (join_at > 0)):
            self._start(worker)
        failed: list[int] = []
        is_over = False
        broken_at = time.monotonic()
        while self._workers:
            time.sleep(0.005)
            changed = self._greet(but=arguments.peers if join_at else None)
            for worker, process in list(self._workers.items()):
                if process.poll() is None:
                    continue
                del self._workers[worker]
                changed |= self._handles.pop(worker, None) is not None
                is_over |= process.returncode == 0
                if process.returncode != 0 and str(worker) != victim:
                    failed.append(worker)
            if to_kill and self._step_of(int(to_kill)) >= int(kill_at):
                say("kill", worker=int(to_kill))
                self._workers[int(to_kill)].kill()
                to_kill = ""
            if join_at and any(self._step_of(worker) >= join_at for worker in self._handles):
                join_at = 0
            if self._uuid and not any(self._value("broken", worker) == self._uuid for worker in self._handles):
                broken_at = time.monotonic()
            retry = time.monotonic() > broken_at + RETRY_S
            if is_over:
                for worker in self._workers.keys() - self._handles.keys():
                    self._workers[worker].terminate()  # it came too late
            elif (changed or retry) and (self._uuid or len(self._handles) == arguments.peers):
                self._tell()
        say("over", failed=failed)
        return 1 if failed else 0

    def _start(self, worker: int) -> None:
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(worker)]
        command += ["--store", f"127.0.0.1:{self._store.port}", "--folder", str(self._arguments.folder)]
        self._workers[worker] = subprocess.Popen(command)

    def _greet(self, but: int | None) -> bool:
        """Register newly announced workers except `but`, which joins later. Return whether there are any."""
        unknown = [each for each in self._workers if each not in self._handles and each != but]
        news = [each for each in unknown if self._store.check([f"handle/{each}"])]
        for worker in news:
            self._handles[worker] = self._store.get(f"handle/{worker}").decode()
        return bool(news)

    def _value(self, what: str, worker: int) -> int:
        key = f"{what}/{worker}"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _step_of(self, worker: int) -> int:
        return self._value("step", worker)

    def _tell(self) -> None:
        """Publish the next world. Newcomers have the highest numbers, so rank 0 is never one of them."""
        self._uuid += 1
        self._store.set(f"world/{self._uuid}", json.dumps([handle for _, handle in sorted(self._handles.items())]))
        self._store.set("newest", str(self._uuid))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--peers", type=int, default=4, help="initial number of workers")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pace", type=float, default=0.05, metavar="SECONDS", help="extra time in each step")
    parser.add_argument("--kill", default="2@50", metavar="WORKER@STEP", help="a worker and its last step; '' for none")
    parser.add_argument("--join", type=int, default=70, metavar="STEP", help="when one more worker joins; 0 for never")
    parser.add_argument("--folder", type=Path, help="of checkpoints; default: a temporary one")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        arguments.folder = arguments.folder or Path(folder)
        return Conductor(arguments).run()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
