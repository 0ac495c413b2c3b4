"""Saving checkpoints in the background, and in a process that is killed or interrupted during a save."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from pccl import Communicator, MasterNode
from pccl.training import DiLoCo, latest_checkpoint
from tests.support.cluster import Background
from tests.training.peers import Peer
from tests.training.state.saved import NOWHERE, at, names, new, steps

# In the background.


class Gate:
    """A stand-in for `os.fsync`: its callers wait until it is opened."""

    def __init__(self) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self._fsync = os.fsync
        self.threads: list[threading.Thread] = []

    def __call__(self, descriptor: int) -> None:
        self.threads.append(threading.current_thread())
        self.reached.set()
        assert self.opened.wait(60)
        self._fsync(descriptor)


def test_background_save_does_not_block_steps(
    master: MasterNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate()
    monkeypatch.setattr("os.fsync", gate)
    peer = Peer(master.address, 1).enter().run(2)
    saved = peer.diloco.digest()
    peer.diloco.save(tmp_path, keep=1, background=True)
    assert gate.reached.wait(60)
    peer.run(4)  # the model has gone on, and no file is there yet
    assert latest_checkpoint(tmp_path) is None
    second = Background(partial(peer.diloco.save, tmp_path, keep=1, background=True))
    gate.opened.set()
    second.result()
    again = new()
    again.load(tmp_path)
    assert again.digest() in (saved, peer.diloco.digest())
    peer.diloco.wait_for_save()
    again.load(tmp_path)
    assert again.digest() == peer.diloco.digest() != saved
    assert names(tmp_path) == steps(4)
    assert threading.current_thread() not in gate.threads
    assert not any(thread.daemon for thread in gate.threads)
    peer.close()


def test_background_save_writes_state_at_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    monkeypatch.setattr("os.fsync", gate)
    diloco = at(1)
    before = diloco.digest()
    diloco.save(tmp_path, background=True)
    for array in diloco._model.values():
        array += 1
    gate.opened.set()
    diloco.wait_for_save()
    again = new()
    again.load(tmp_path)
    assert again.digest() == before


def test_background_errors_are_raised_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "no space left")

    diloco = at(1)
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        diloco.save(tmp_path, background=True)
        with pytest.raises(OSError, match="no space left"):
            diloco.wait_for_save()
        diloco.wait_for_save()  # once
        diloco.save(tmp_path, background=True)
        with pytest.raises(OSError, match="no space left"):
            diloco.save(tmp_path, background=True)
    assert "step-000000001.safetensors; the next save will raise this error: OSError(28" in caplog.text
    assert names(tmp_path) == []
    diloco.save(tmp_path, background=True)
    diloco.wait_for_save()
    assert names(tmp_path) == steps(1)


def test_background_save_completes_at_exit(tmp_path: Path) -> None:
    code = """if True:
        import os, sys, time
        import numpy as np
        from pccl import Communicator
        from pccl.training import DiLoCo
        fsync = os.fsync
        os.fsync = lambda descriptor: (time.sleep(0.2), fsync(descriptor))
        diloco = DiLoCo(Communicator("127.0.0.1:1"), {"weights": np.arange(5.0)})
        diloco.save(sys.argv[1], background=True)
        raise KeyboardInterrupt
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert "KeyboardInterrupt" in done.stderr
    assert names(tmp_path) == steps(0)
    again = DiLoCo(Communicator(NOWHERE), {"weights": np.zeros(5)})
    again.load(tmp_path)
    assert again.outer_parameters.tolist() == [0, 1, 2, 3, 4]


# Kills.


def test_kill_during_save_leaves_whole_checkpoints(tmp_path: Path) -> None:
    """A process is killed before each call of C, such as writes, flushes and renames."""
    command = [sys.executable, "-m", "tests.training.state.checkpoint_kills", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    kills, older, newer = json.loads(done.stdout)
    assert kills > 50
    assert older > 0
    assert newer > 0
    assert names(tmp_path) == steps(kills + 1)
