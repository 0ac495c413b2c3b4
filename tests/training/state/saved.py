"""Training loops without peers, at any revision, and the names of their checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from pccl import Communicator
from pccl.training import DiLoCo
from pccl.training.state.tensor_file import Contents, Entry, encode, entry_of, write
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


def write_format_2(path: Path, kind: str, revision: int, state: Any, layout: str) -> None:
    """Write a checkpoint as version 0.3.0 and earlier did."""
    data, tensors, _ = encode(state)
    of_torch = [name for name, tensor in tensors.items() if not isinstance(tensor, np.ndarray)]
    manifest = {"format": 2, "version": "0.3.0", "class": kind, "revision": revision, "save": "", "rank": 0, "size": 1}
    manifest |= {"layout": layout, "options": "", "torch": of_torch, "shards": {}}
    rest = Entry("U8", (len(data),), np.frombuffer(data, np.uint8))
    entries = {"rest": rest, **{name: entry_of(tensor) for name, tensor in tensors.items()}}
    write(path, Contents({"pccl": json.dumps(manifest)}, entries))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def steps(*revisions: int) -> list[str]:
    return [f"step-{revision:09d}.safetensors" for revision in revisions]
