"""torch.compile: pccl is outside of graphs, and groups of other backends are compiled as without it."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pccl import MasterNode, ReduceOp
from pccl.training import DDP
from tests.support.cluster import Cluster, together

torch = pytest.importorskip("torch")

from tests.torch import compiled_ranks  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 300.0


@pytest.fixture(autouse=True)
def no_active_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the module that other tests leave here: torch restores the value of another thread after a forward."""
    monkeypatch.setattr(torch.nn.parallel.DistributedDataParallel, "_active_ddp_module", None)


def outcomes(backend: str) -> list[dict[str, str]]:
    """Return what each rank of a group with this backend has found in each case."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.torch.compiled_ranks", backend]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), f"{folder}/store"],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(compiled_ranks.SIZE)
        ]
        try:
            said = [rank.communicate(timeout=LIMIT_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), said
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


@pytest.mark.parametrize("backend", ["gloo", "pccl"])
def test_compiled_equals_uncompiled(backend: str) -> None:
    wrong = {
        f"{name} on rank {rank}": outcome
        for rank, found in enumerate(outcomes(backend))
        for name, outcome in found.items()
        if outcome != "equal"
    }
    assert not wrong


def test_import_torch_does_not_import_compiler() -> None:
    program = "import sys, torch, pccl, pccl.torch, pccl.training; sys.exit('torch._dynamo' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=LIMIT_S)


@pytest.mark.parametrize("order", ["import pccl, torch", "import torch, pccl"])
def test_graphs_break_in_any_import_order(order: str) -> None:
    program = f"""{order}
torch.manual_seed(0)
communicator = pccl.Communicator("127.0.0.1:1", timeout=0)
@torch.compile(backend="eager")
def step(tensor):
    tensor = tensor * 2
    try:
        communicator.all_reduce(tensor)
    except pccl.PCCLError as error:
        return tensor + 1, error.result
result = step(torch.ones(3))
assert torch.equal(result[0], torch.full((3,), 3.0)), result
assert result[1] is pccl.Result.NOT_INITIALIZED, result
import torch._dynamo.convert_frame
traced = {{code.co_filename for code in torch._dynamo.convert_frame.output_codes.seen}}
assert not [name for name in traced if "/pccl/" in name or "_pccl_torch" in name], traced
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def new_module() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


@pytest.fixture
def pair(master: MasterNode) -> Any:
    cluster = Cluster(master.address)
    cluster.join(2, master_timeout=LIMIT_S)  # compiling holds the GIL, and the master may take that for a suspension
    yield cluster.peers
    torch._dynamo.reset()
    cluster.close_all()


def test_communicator_in_compiled_function(pair: Any) -> None:
    def doubled_sum(peer: Any, number: int) -> Any:
        @torch.compile(backend="eager")
        def call(tensor: Any) -> Any:
            tensor = tensor * 2
            peer.all_reduce(tensor, op=ReduceOp.SUM)
            handle = peer.all_reduce_async(tensor, op=ReduceOp.SUM)
            handle.wait()
            return tensor + 1

        return call(torch.full((3,), float(number + 1)))

    for found in together([partial(doubled_sum, peer, number) for number, peer in enumerate(pair)]):
        assert torch.equal(found, torch.full((3,), 13.0))


@pytest.mark.parametrize("compiled", ["forward", "step"])
def test_pccl_ddp_in_compiled_steps(pair: Any, compiled: str) -> None:
    def trained(peer: Any, number: int, module: Any, compiled: str, tag: int) -> Any:
        ddp = DDP(peer, module, torch.optim.SGD(module.parameters(), lr=0.1), tag=tag)
        ddp.join(2)

        def forward(inputs: Any) -> Any:
            return ddp(inputs).square().mean()

        if compiled == "forward":
            forward = torch.compile(forward, backend="aot_eager")

        def step(inputs: Any) -> None:
            forward(inputs).backward()
            ddp.step()

        if compiled == "step":
            step = torch.compile(step, backend="eager")
        inputs = torch.Generator().manual_seed(number)
        for _ in range(3):
            step(torch.randn(5, 6, generator=inputs))
        ddp.close()
        return torch.nn.utils.parameters_to_vector(module.parameters()).detach()

    expected = together([partial(trained, peer, number, new_module(), "", 0) for number, peer in enumerate(pair)])
    found = together([partial(trained, peer, number, new_module(), compiled, 100) for number, peer in enumerate(pair)])
    for mine, theirs in zip(expected, found, strict=True):
        torch.testing.assert_close(mine, theirs)
