"""Numbers set on training classes after construction: integers of any library are taken, others are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pccl import Communicator, MasterNode
from pccl.training import AsyncDiLoCo, DiLoCo, DiLoCoOptimizer, RandomStreams

torch = pytest.importorskip("torch")

NOT_INTEGERS = (2.5, "3", True, np.float64(2))


def refused(call: Callable[[Any], object], name: str) -> None:
    for wrong in NOT_INTEGERS:
        with pytest.raises(ValueError, match=rf"{name} .* is not an integer.* of type {type(wrong).__name__}"):
            call(wrong)


@pytest.mark.parametrize("kind", [DiLoCo, AsyncDiLoCo])
def test_non_integers_are_refused_by_name(master: MasterNode, tmp_path: Path, kind: Any) -> None:
    module = torch.nn.Linear(2, 2)
    diloco = kind(Communicator(master.address), module, torch.optim.SGD(module.parameters(), lr=0.1))
    refused(lambda wrong: diloco.save(tmp_path, keep=wrong), "keep")
    refused(lambda wrong: DiLoCoOptimizer(diloco, peers_min=wrong), "peers_min")
    refused(RandomStreams, "seed")
    diloco.connect()
    diloco.join(np.int64(1))
    refused(lambda wrong: diloco.outer_step(inner_steps=wrong), "inner_steps")
    diloco.outer_step(inner_steps=np.int64(3))
    diloco.save(tmp_path, keep=np.int64(2))
    diloco._communicator.close()
