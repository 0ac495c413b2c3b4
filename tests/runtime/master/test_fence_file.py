"""The record that a master keeps on disk: all of a record or the one before, and one master at a time."""

from __future__ import annotations

import os
import shutil
import stat
import time
from pathlib import Path

import msgspec
import pytest

from pccl.protocol.failover.durable_state import RecordedView, RunRecord
from pccl.runtime.master.durable_state import LOCK, RECORD, StateDirectory, StateError

FENCE = RunRecord(
    "a run", b"\x00\xffsecret", 3, RecordedView.of(7, [1, 2, 3]), [RecordedView.of(8, [1, 2])], False, 90.0
)


def test_a_record_is_read_again(tmp_path: Path) -> None:
    directory = str(tmp_path / "new" / "state")
    state = StateDirectory(directory, "here")
    assert state.record is None
    state.write(FENCE)
    state.close()
    again = StateDirectory(directory, "here")
    assert again.record == FENCE
    again.close()


def test_record_is_replaced(tmp_path: Path) -> None:
    state = StateDirectory(str(tmp_path), "here")
    for term in (3, 4, 5):
        record = msgspec.structs.replace(FENCE, term=term)
        state.write(record)
        state.close()
        assert sorted(os.listdir(tmp_path)) == sorted([LOCK, RECORD])
        state = StateDirectory(str(tmp_path), "here")
        assert state.record == record
    state.close()


def test_write_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateDirectory(str(tmp_path), "here")
    done: list[str] = []
    fsync, rename = os.fsync, os.rename

    def sync(fd: int) -> None:
        fsync(fd)
        done.append("directory" if stat.S_ISDIR(os.fstat(fd).st_mode) else "record")

    def name(old: str, new: str) -> None:
        rename(old, new)
        done.append("name")

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "rename", name)
    state.write(FENCE)
    state.close()
    assert done == ["record", "name", "directory"]


def test_only_the_owner_reads_it(tmp_path: Path) -> None:
    state = StateDirectory(str(tmp_path / "state"), "here")
    state.write(FENCE)
    state.close()
    assert stat.S_IMODE(os.stat(tmp_path / "state").st_mode) == 0o700
    assert stat.S_IMODE(os.stat(tmp_path / "state" / RECORD).st_mode) == 0o600


def test_directory_in_use(tmp_path: Path) -> None:
    first = StateDirectory(str(tmp_path), "10.0.0.1:48148")
    with pytest.raises(StateError, match=f"is in use by the master at 10.0.0.1:48148, process {os.getpid()} on "):
        StateDirectory(str(tmp_path), "10.0.0.2:48148")
    first.close()
    StateDirectory(str(tmp_path), "10.0.0.2:48148").close()


def test_forked_child_releases_lock(tmp_path: Path) -> None:
    """A child's copy of the lock's descriptor is closed, and the parent's lock stays."""
    state = StateDirectory(str(tmp_path), "here")
    child = os.fork()
    if child == 0:
        state.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(StateError, match="in use"):
        StateDirectory(str(tmp_path), "there")
    state.close()


def test_a_write_that_fails_leaves_the_record_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = StateDirectory(str(tmp_path), "here")
    state.write(FENCE)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            state.write(RunRecord("another", b"", 1, None))
    state.close()
    again = StateDirectory(str(tmp_path), "here")
    assert again.record == FENCE
    again.close()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 1}', "\xff"])
def test_invalid_record(tmp_path: Path, text: str) -> None:
    (tmp_path / RECORD).write_text(text, encoding="latin-1")
    for _ in range(2):
        with pytest.raises(StateError, match=f"{RECORD} is not a valid record"):
            StateDirectory(str(tmp_path), "here")


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    state = StateDirectory(str(tmp_path), "here")
    state.write(FENCE)
    state.close()
    path = tmp_path / RECORD
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(StateError, match="has format 2"):
        StateDirectory(str(tmp_path), "here")


def test_a_directory_that_cannot_be_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=r"cannot keep state in .*file/state: "):
        StateDirectory(str(tmp_path / "file" / "state"), "here")
    (tmp_path / LOCK).mkdir()
    with pytest.raises(StateError, match="cannot keep state"):
        StateDirectory(str(tmp_path), "here")


def test_no_write_after_lost_lock(tmp_path: Path) -> None:
    directory = tmp_path / "state"
    state = StateDirectory(str(directory), "here")
    state.write(FENCE)
    directory.rename(tmp_path / "away")
    with pytest.raises(OSError, match="'lock' was removed or replaced"):
        state.write(FENCE)
    other = StateDirectory(str(directory), "there")
    with pytest.raises(OSError, match="'lock' was removed or replaced"):
        state.write(FENCE)
    assert not (directory / RECORD).exists()
    other.close()
    shutil.rmtree(directory)
    (tmp_path / "away").rename(directory)
    state.write(FENCE)
    state.close()


def test_idle_time_of_directory(tmp_path: Path) -> None:
    state = StateDirectory(str(tmp_path), "here")
    assert state.idle_s < 100
    state.write(FENCE)
    state.close()
    for path, age_s in ((tmp_path / LOCK, 500.0), (tmp_path / LOCK, 1000.0)):
        os.utime(path, (time.time() - age_s,) * 2)
        state = StateDirectory(str(tmp_path), "here")
        assert state.idle_s == pytest.approx(age_s, abs=100)
        state.touch()
        state.close()
    state = StateDirectory(str(tmp_path), "here")
    assert state.idle_s < 100
    state.close()


def test_give_up_removes_record(tmp_path: Path) -> None:
    state = StateDirectory(str(tmp_path), "here", is_optional=True)
    state.write(FENCE)
    state.give_up()
    state.give_up()
    state.close()
    state = StateDirectory(str(tmp_path), "here", is_optional=True)
    assert state.record is None
    state.close()


def test_the_record_of_another_master_is_not_removed(tmp_path: Path) -> None:
    state = StateDirectory(str(tmp_path), "here", is_optional=True)
    os.remove(tmp_path / LOCK)
    other = StateDirectory(str(tmp_path), "there")
    other.write(FENCE)
    state.give_up()
    assert (tmp_path / RECORD).exists()
    state.close()
    other.close()
