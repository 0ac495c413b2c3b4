"""Peers are killed or stopped during a sync of shared state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pccl.runtime.state.tensor_blocks import BLOCK_BYTES
from tests.processes.conftest import Run
from tests.processes.harness import Worker

COUNT = 24 * 2**20
"""96 MiB of float32."""


class Transfer:
    """A large state on its way to the last of the workers, which is stopped in the middle of it.

    The receiver's tensor lies in a file, so that the test sees it, too.
    """

    def __init__(self, workers: list[Worker], file: Path) -> None:
        *self.donors, self.receiver = workers
        for worker in self.donors:
            worker.do("array", name="x", count=COUNT, value=7)
            worker.do("state", name="s", arrays=["x"], revision=3)
        self.receiver.do("array", name="x", count=COUNT, file=str(file))
        self.receiver.do("state", name="s", arrays=["x"])
        landed = np.memmap(file, np.float32, "r", shape=(COUNT,))
        for worker in self.donors:
            worker.begin("sync", name="s")
        self.receiver.begin("sync", name="s", stop_after=4 * COUNT // BLOCK_BYTES // 2)
        self.receiver.until_stopped()
        assert landed.any()
        assert not landed.all()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "tensor"


def test_sync_continues_without_a_killed_donor(run: Run, file: Path) -> None:
    transfer = Transfer(run(3), file)
    first, second = transfer.donors
    first.kill()
    transfer.receiver.resume()
    tx, rx, revision = second.answer().value
    assert (rx, revision) == (0, 3)
    assert 0 < tx < 4 * COUNT, "what the first donor had sent was sent again"
    assert transfer.receiver.answer().value == [0, 4 * COUNT, 3]
    assert transfer.receiver.do("digest", name="x") == second.do("digest", name="x")


def test_sync_fails_when_the_last_donor_is_killed(run: Run, file: Path) -> None:
    transfer = Transfer(run(2), file)
    transfer.donors[0].kill()
    transfer.receiver.resume()
    answer = transfer.receiver.answer()
    assert answer.error == "NO_SHARED_STATE_AVAILABLE"
    assert "donor 1" in answer.text
    assert "overwritten here at least partly: x" in answer.text
    assert transfer.receiver.do("sync", name="s") == [0, 0, 0], "it is the whole group now, with what it has"


def test_sync_continues_without_a_killed_receiver(run: Run, file: Path) -> None:
    transfer = Transfer(run(3), file)
    transfer.receiver.kill()
    for donor in transfer.donors:
        tx, rx, revision = donor.answer().value
        assert (tx < 4 * COUNT, rx, revision) == (True, 0, 3)
    for donor in transfer.donors:
        donor.begin("sync", name="s")
    assert [donor.answer().value for donor in transfer.donors] == [[0, 0, 3]] * 2


def test_sync_continues_without_a_stopped_donor(run: Run, file: Path) -> None:
    transfer = Transfer(run(3), file)
    first, second = transfer.donors
    first.stop()
    transfer.receiver.resume()
    assert transfer.receiver.answer().value == [0, 4 * COUNT, 3]
    assert second.answer().value[0] > 0
    first.resume()
    assert first.answer().value[2] == 3
    digest = first.do("digest", name="x")
    assert [worker.do("digest", name="x") for worker in (second, transfer.receiver)] == [digest, digest]
