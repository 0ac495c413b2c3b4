"""Files that are replaced at once, or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from pccl import flight_recorder
from pccl.flight_recorder import Replacement


def test_file_is_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"former")
    path.chmod(0o640)
    with Replacement(path) as new:
        assert path.read_bytes() == b"former"
        new.write(b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["file"]


def test_failure_keeps_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"former")
    with pytest.raises(KeyboardInterrupt), Replacement(path):
        raise KeyboardInterrupt
    assert path.read_bytes() == b"former"
    assert os.listdir(tmp_path) == ["file"]


def test_full_disk_keeps_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    path.write_bytes(b"former")
    monkeypatch.setattr(flight_recorder.os, "replace", is_full)
    with pytest.raises(OSError, match="No space left") as caught, Replacement(path) as new:
        new.write(b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"former"
    assert os.listdir(tmp_path) == ["file"]


def test_unwritable_path_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in (tmp_path, tmp_path / "missing" / "file", tmp_path / "file" / "file"):
        with pytest.raises(OSError, match=r".") as caught:
            Replacement(wrong)
        assert caught.value.filename == str(wrong)
