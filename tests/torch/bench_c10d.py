"""The time of torch.distributed's calls on pccl and on Gloo, in turns in the same processes: a table with the ratios.

    python -m tests.torch.bench_c10d                                   # all calls, 4 KiB to 64 MiB, 2 and 4 ranks
    python -m tests.torch.bench_c10d --calls all_reduce --sizes 4KiB --world-size 2

Each process has a group of either backend over all ranks. For each call and size the backends take turns, some dozens
of rounds; a round is a block of calls one after the other, as many as take about 20 ms, whose time is that of the rank
that took longest. Shown are the medians of a call in microseconds, and pccl's divided by Gloo's: below 1, pccl is
faster. The size is that of the whole tensor: what a rank gets from all_gather, and puts into reduce_scatter_tensor and
all_to_all_single; what the root of gather gets, and that of scatter gives.

The point-to-point cases are of a tensor of the size between the ranks 0 and 1, and 2 and 3:

    one_way              send on one side, recv on the other
    ping_pong            there and back
    isend_irecv          both ways at once, and both are waited for
    batch_isend_irecv    every rank sends to the next one and receives from the one before
"""

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import pccl.torch  # noqa: F401  (registers the backend)

SIZES = ["4KiB", "16KiB", "64KiB", "256KiB", "1MiB", "4MiB", "16MiB", "64MiB"]
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "B": 1}
COLLECTIVES = ["all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single"]
ROOTED = ["reduce", "gather", "scatter", "all_gather"]
PAIRS = ["one_way", "ping_pong", "isend_irecv", "batch_isend_irecv"]
CALLS = [*COLLECTIVES, *ROOTED, *PAIRS, "barrier"]
BACKENDS = ("gloo", "pccl")
BLOCK_S = 0.02

Call = Callable[[dist.ProcessGroup], object]


def size_of(text: str) -> int:
    """The bytes that "64KiB" names."""
    unit = next(unit for unit in UNITS if text.endswith(unit))
    return int(text.removesuffix(unit)) * UNITS[unit]


def calls(size_bytes: int) -> dict[str, Call]:
    """The calls to be measured, on float32 tensors of that many bytes."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole = torch.ones(size_bytes // 4)
    other = torch.empty_like(whole)
    part = torch.ones(whole.numel() // ranks)
    parts = [torch.ones_like(part) for _ in range(ranks)]
    of_root = parts if rank == 0 else None
    return {
        "all_reduce": lambda group: dist.all_reduce(whole, dist.ReduceOp.MAX, group=group),
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(part, whole, group=group),
        "broadcast": lambda group: dist.broadcast(whole, src=0, group=group),
        "all_to_all_single": lambda group: dist.all_to_all_single(other, whole, group=group),
        "reduce": lambda group: dist.reduce(whole, 0, dist.ReduceOp.MAX, group=group),
        "gather": lambda group: dist.gather(part, of_root, 0, group=group),
        "scatter": lambda group: dist.scatter(part, of_root, 0, group=group),
        "all_gather": lambda group: dist.all_gather(parts, part, group=group),
        **pair_calls(whole, other),
        "barrier": lambda group: dist.barrier(group=group),
    }


def pair_calls(whole: torch.Tensor, other: torch.Tensor) -> dict[str, Call]:
    """The calls between pairs of ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    peer, is_first = rank ^ 1, rank % 2 == 0

    def one_way(group: dist.ProcessGroup) -> None:
        if is_first:
            dist.send(whole, peer, group)
        else:
            dist.recv(other, peer, group)

    def ping_pong(group: dist.ProcessGroup) -> None:
        if is_first:
            dist.send(whole, peer, group)
            dist.recv(other, peer, group)
        else:
            dist.recv(other, peer, group)
            dist.send(whole, peer, group)

    def both_ways(group: dist.ProcessGroup) -> None:
        works = dist.isend(whole, peer, group), dist.irecv(other, peer, group)
        for work in works:
            work.wait()

    def in_a_batch(group: dist.ProcessGroup) -> None:
        ops = [
            dist.P2POp(dist.isend, whole, (rank + 1) % ranks, group),
            dist.P2POp(dist.irecv, other, (rank - 1) % ranks, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return {"one_way": one_way, "ping_pong": ping_pong, "isend_irecv": both_ways, "batch_isend_irecv": in_a_batch}


def block(call: Call, group: dist.ProcessGroup, times: int) -> float:
    """Seconds a call, of `times` calls one after the other."""
    began = time.perf_counter()
    for _ in range(times):
        call(group)
    return (time.perf_counter() - began) / times


def longest(seconds: float) -> float:
    """The most that any rank gives."""
    most = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def compare(call: Call, groups: dict[str, dist.ProcessGroup], rounds: int) -> dict[str, float]:
    """The median seconds of a call, by backend."""
    times = {}
    for name, group in groups.items():
        block(call, group, 2)
        times[name] = max(1, min(200, round(BLOCK_S / longest(block(call, group, 3)))))
    samples: dict[str, list[float]] = {name: [] for name in groups}
    for number in range(rounds):
        for name in sorted(groups, reverse=bool(number % 2)):
            dist.barrier()
            samples[name].append(longest(block(call, groups[name], times[name])))
    return {name: statistics.median(values) for name, values in samples.items()}


def run_rank(rank: int, ranks: int, options: argparse.Namespace, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timedelta(seconds=options.timeout)
    )
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    for name in options.calls:
        for size in options.sizes if name != "barrier" else ["0B"]:
            size_bytes = size_of(size)
            rounds = options.rounds if size_bytes < 16 << 20 else max(5, options.rounds // 3)
            medians = compare(calls(size_bytes or 4)[name], groups, rounds)
            if rank == 0:
                gloo_us, pccl_us = medians["gloo"] * 1e6, medians["pccl"] * 1e6
                row = (name, str(ranks), size if size_bytes else "", f"{gloo_us:.0f}", f"{pccl_us:.0f}")
                print("| " + " | ".join([*row, f"{pccl_us / gloo_us:.2f}"]) + " |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=CALLS)
    parser.add_argument("--sizes", nargs="+", default=SIZES)
    parser.add_argument("--world-size", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--timeout", type=float, default=120, help="seconds that a call may take")
    options = parser.parse_args()
    print("| call | ranks | size | Gloo µs | pccl µs | pccl/Gloo |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    for ranks in options.world_size:
        with tempfile.TemporaryDirectory() as folder:
            rendezvous = f"file://{os.path.join(folder, 'rendezvous')}"
            fork = multiprocessing.get_context("fork")
            processes = [
                fork.Process(target=run_rank, args=(rank, ranks, options, rendezvous)) for rank in range(ranks)
            ]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
