"""Saves checkpoints in child processes, killed before one call of C after another; says how many there were,
and how often the former or the new checkpoint was the newest then:
`python -m tests.training.state.checkpoint_kills FOLDER`."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from pccl.training import latest_checkpoint
from pccl.training.state import checkpoint, tensor_file

PARTS = {str(Path(str(module.__file__))) for module in (checkpoint, tensor_file)}
tensor_file.CHUNK_BYTES = 1000


def snapshot(revision: int) -> checkpoint.Snapshot:
    return checkpoint.Snapshot(revision, {"weights": np.full(1000, revision)}, "weights (1000,)")


def save(folder: Path, revision: int) -> None:
    checkpoint.Checkpoints("Test").save(folder, lambda: snapshot(revision), keep=1, background=False)


def saved_and_killed(folder: Path, revision: int, call: int) -> bool:
    """Whether a child was killed before its `call`th call of C."""
    child = os.fork()
    if child == 0:
        calls = 0

        def kill(frame: FrameType, event: str, _: Any) -> None:
            nonlocal calls
            if event == "c_call" and frame.f_code.co_filename in PARTS:
                if calls == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                calls += 1

        sys.setprofile(kill)
        save(folder, revision)
        sys.setprofile(None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), status
    return status != 0


def main(folder: Path) -> None:
    save(folder, 0)
    kills = older = newer = 0
    while saved_and_killed(folder, kills + 1, kills):
        kills += 1
        path = latest_checkpoint(folder)
        assert path is not None
        loaded = checkpoint.load(path, None, lambda tensor, _: tensor)[1]
        weights = loaded.state["weights"]
        assert (weights == loaded.revision).all(), path
        assert loaded.revision in (kills - 1, kills), path
        newer += loaded.revision == kills
        older += loaded.revision < kills
        save(folder, kills)  # each child finds one checkpoint, and what the one before it left behind
        assert len(list(folder.iterdir())) == 1, "temporary files of killed processes are left"
    print(json.dumps([kills, older, newer]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
