"""The names of tensors in checkpoints: those of the module's `state_dict()`, whether it is compiled or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pccl import Communicator, MasterNode
from pccl.training import DDP, SPSA, DiLoCo, SPSAOptions
from pccl.training.state import tensor_file
from tests.support.cluster import together
from tests.training.state.saved import NOWHERE, write_format_2

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile imports what it deprecates


class Rotary(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("angles", torch.ones(4), persistent=False)

    def forward(self, inputs: Any) -> Any:
        return self.norm(self.linear(inputs)) * self.angles


def ddp_of(module: Any) -> Any:
    return DDP(Communicator(NOWHERE), module, torch.optim.AdamW(module.parameters()))


def diloco_of(module: Any) -> Any:
    return DiLoCo(Communicator(NOWHERE), module, torch.optim.AdamW(module.parameters()))


def spsa_of(module: Any) -> Any:
    return SPSA(Communicator(NOWHERE), module, SPSAOptions(learning_rate=0.1))


@pytest.mark.parametrize("of", [ddp_of, diloco_of, spsa_of])
def test_file_has_the_names_of_the_state_dict(tmp_path: Path, of: Callable[[Any], Any]) -> None:
    module = Rotary()
    module.norm.running_mean.fill_(3)
    path = tmp_path / "one.safetensors"
    of(module).save(path)
    entries = tensor_file.read(path).entries
    found = {name: entry for name, entry in entries.items() if not name.startswith("pccl/")}
    wanted = module.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(tensor_file.tensor_of(found[name], is_torch=True), value), name


@pytest.mark.parametrize("of", [ddp_of, diloco_of, spsa_of])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_checkpoint_of_compiled_module_fits_the_plain_one(
    tmp_path: Path, of: Callable[[Any], Any], is_compiled: bool
) -> None:
    def wrapped(module: Any, is_compiled: bool) -> Any:
        return torch.compile(module) if is_compiled else module

    path = tmp_path / "one.safetensors"
    saved = Rotary()
    saved.norm.running_mean.fill_(3)
    first = of(wrapped(saved, is_compiled))
    first.save(path)
    again = Rotary()
    other = of(wrapped(again, not is_compiled))
    assert other.load(path)
    assert other.digest() == first.digest()
    assert torch.equal(again.linear.weight, saved.linear.weight)
    assert torch.equal(again.norm.running_mean, saved.norm.running_mean)


def test_older_file_of_a_compiled_module_still_loads(tmp_path: Path) -> None:
    module = Rotary()
    ddp = ddp_of(module)
    snapshot = ddp._snapshot()
    state: Any = dict(snapshot.state)
    for part in ("parameters", "buffers"):
        state[part] = {f"_orig_mod.{name}": value for name, value in state[part].items()}
    lines = snapshot.layout.splitlines()
    layout = "\n".join(line if line.startswith("optimizer") else f"_orig_mod.{line}" for line in lines)
    write_format_2(tmp_path / "one.safetensors", "DDP", 7, state, layout)
    other = ddp_of(Rotary())
    assert other.load(tmp_path / "one.safetensors")
    ddp._state.revision = 7
    assert (other.revision, other.digest()) == (7, ddp.digest())


def test_compiled_and_plain_peers_train_together() -> None:
    with MasterNode("127.0.0.1:0") as master:

        def script(number: int) -> str:
            torch.manual_seed(0)
            module = torch.nn.Linear(4, 4)
            with Communicator(master.address) as communicator:
                made = torch.compile(module, backend="eager") if number else module
                ddp = DDP(communicator, made, torch.optim.SGD(module.parameters(), lr=0.1), check_every=1)
                ddp.join(2)
                torch.full((3, 4), float(number)).matmul(module.weight).sum().backward()
                assert ddp.step().world_size == 2
                return ddp.digest()

        assert len(set(together([partial(script, number) for number in range(2)]))) == 1
