"""Files that are replaced at once, or not at all."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from pccl import _replacement
from pccl._replacement import Replacement


def test_a_file_is_replaced_when_all_is_written(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"former")
    path.chmod(0o640)
    with Replacement(path) as new:
        assert path.read_bytes() == b"former"
        new.write(b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["file"]


def test_a_new_file_is_as_any_other(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    with Replacement(tmp_path / "new") as new:
        new.write(b"new")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_what_fails_meanwhile_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"former")
    with pytest.raises(KeyboardInterrupt), Replacement(path):
        raise KeyboardInterrupt
    assert path.read_bytes() == b"former"
    assert os.listdir(tmp_path) == ["file"]


def test_a_disk_that_is_full_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    path.write_bytes(b"former")
    monkeypatch.setattr(_replacement.os, "replace", is_full)
    with pytest.raises(OSError, match="No space left") as caught, Replacement(path) as new:
        new.write(b"new")
    assert caught.value.filename == str(path)
    assert path.read_bytes() == b"former"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to("folder/file")
    with Replacement(link) as new:
        new.write(b"new")
    assert link.is_symlink()
    assert (tmp_path / "folder" / "file").read_bytes() == b"new"


def test_a_place_that_cannot_be_written_is_named_before_anything_is(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in (tmp_path, tmp_path / "missing" / "file", tmp_path / "file" / "file"):
        with pytest.raises(OSError, match=r".") as caught:
            Replacement(wrong)
        assert caught.value.filename == str(wrong)


def test_a_name_of_a_folder_makes_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="'new/'"):
        Replacement("new/")
    with pytest.raises(FileNotFoundError, match="No such file or directory: ''"):
        Replacement("")
    assert os.listdir(tmp_path) == []


def test_pipes_and_devices_are_written_as_they_are(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    with Replacement(pipe) as new:
        new.write(b"new")
    reader.join()
    assert read == [b"new"]
    with Replacement(os.devnull) as new:
        new.write(b"new")
    with pytest.raises(OSError, match="No space left") as caught, Replacement("/dev/full") as new:
        new.write(b"new")
    assert caught.value.filename == "/dev/full"
