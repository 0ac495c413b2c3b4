"""Peers are killed while shared state is on its way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pccl.runtime.state.tensor_blocks import BLOCK_BYTES
from tests.processes.harness import Worker

Run = Callable[..., list[Worker]]

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


def test_another_donor_finishes_what_a_killed_one_began(run: Run, file: Path) -> None:
    transfer = Transfer(run(3), file)
    first, second = transfer.donors
    first.kill()
    transfer.receiver.resume()
    tx, rx, revision = second.answer().value
    assert (rx, revision) == (0, 3)
    assert 0 < tx < 4 * COUNT, "what the first donor had sent was sent again"
    assert transfer.receiver.answer().value == [0, 4 * COUNT, 3]
    assert transfer.receiver.do("digest", name="x") == second.do("digest", name="x")


def test_with_the_last_donor_the_state_is_gone_and_the_error_says_what_is_spoiled(run: Run, file: Path) -> None:
    transfer = Transfer(run(2), file)
    transfer.donors[0].kill()
    transfer.receiver.resume()
    answer = transfer.receiver.answer()
    assert answer.error == "NO_SHARED_STATE_AVAILABLE"
    assert "donor 1" in answer.text
    assert "overwritten here, at least in part: x" in answer.text
    assert transfer.receiver.do("sync", name="s") == [0, 0, 0], "it is the whole group now, with what it has"


def test_donors_go_on_without_a_receiver_that_is_killed(run: Run, file: Path) -> None:
    transfer = Transfer(run(3), file)
    transfer.receiver.kill()
    for donor in transfer.donors:
        tx, rx, revision = donor.answer().value
        assert (tx < 4 * COUNT, rx, revision) == (True, 0, 3)
    for donor in transfer.donors:
        donor.begin("sync", name="s")
    assert [donor.answer().value for donor in transfer.donors] == [[0, 0, 3]] * 2


def test_the_call_goes_on_without_a_peer_that_is_killed_before_it_has_called(run: Run) -> None:
    *waiting, victim = run(3)
    for worker in waiting:
        worker.do("array", name="x", count=10, value=1)
        worker.do("state", name="s", arrays=["x"], revision=5)
        worker.begin("sync", name="s")
        worker.until_asleep()
    victim.kill()
    assert [worker.answer().value for worker in waiting] == [[0, 0, 5]] * 2


def test_a_donor_that_is_stopped_is_not_waited_for(run: Run, file: Path) -> None:
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


def test_all_donors_serve_all_who_join(run: Run) -> None:
    workers = run(4)
    donors = workers[:2]
    for worker in workers:
        worker.do("array", name="x", count=COUNT // 2, value=7 if worker in donors else 0)
        worker.do("state", name="s", arrays=["x"], revision=3 if worker in donors else 0)
    for worker in workers:
        worker.begin("sync", name="s")
    moved = [worker.answer().value for worker in workers]
    assert moved[2:] == [[0, 2 * COUNT, 3]] * 2
    assert all(tx > 0 for tx, _, _ in moved[:2])
    assert len({worker.do("digest", name="x") for worker in workers}) == 1
