"""Training loops without peers, at any revision, and the names of their checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pccl import Communicator
from pccl.training import DiLoCo
from tests.training.peers import new_model

NOWHERE = "127.0.0.1:1"


def new(kind: Any = DiLoCo, **options: Any) -> Any:
    loop = kind(Communicator(NOWHERE), new_model(), **options)
    loop._replicated.history = 1  # all are of one run
    return loop


def at(revision: int, **options: Any) -> Any:
    """A DiLoCo in the state after `revision` outer steps."""
    diloco = new(**options)
    for array in diloco._model.values():
        array += np.float32(revision)
    diloco._state.revision = revision
    return diloco


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps(*revisions: int) -> list[str]:
    return [f"step-{revision:09d}.safetensors" for revision in revisions]
