"""A file that is replaced at once, or not at all.

The new content goes to a temporary file in the same folder, which replaces the old one when it is complete. It is made
first, so that a place that cannot be written is known before there is content. Pipes and devices are written directly.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from types import TracebackType
from typing import BinaryIO

Path = str | os.PathLike[str]


class Replacement:
    """The new content of a file. Used by `with`, which throws away what was not written."""

    def __init__(self, path: Path) -> None:
        """Make ready. OSError, which names `path`, if it cannot be written."""
        self._path = os.fspath(path)
        if not self._path or self._path.endswith(os.sep):
            code = errno.EISDIR if self._path else errno.ENOENT
            raise OSError(code, os.strerror(code), self._path)
        self._target = os.path.realpath(path)
        self._temporary: str | None = None
        try:
            self._file = self._opened()
        except OSError as error:
            raise self._of_path(error) from None

    def _opened(self) -> BinaryIO:
        try:
            if not stat.S_ISREG(os.stat(self._path).st_mode):
                return open(self._path, "wb", buffering=0)
        except FileNotFoundError:
            pass
        temporary = os.path.join(os.path.dirname(self._target), f".pccl-{os.urandom(8).hex()}.part")
        file = open(temporary, "xb")  # noqa: SIM115 - `__exit__` closes it
        self._temporary = temporary
        return file

    def __enter__(self) -> Replacement:
        return self

    def write(self, content: bytes) -> None:
        """Write all of the content, and put it in place. To be called once. OSError, which names the path."""
        try:
            with self._file as file:
                rest = memoryview(content)
                while rest:
                    rest = rest[file.write(rest) :]
            if self._temporary is not None:
                with suppress(OSError):  # there was none, or it is another user's
                    shutil.copymode(self._target, self._temporary)
                os.replace(self._temporary, self._target)
                self._temporary = None
        except OSError as error:
            raise self._of_path(error) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._file.close()
        if self._temporary is not None:
            with suppress(OSError):
                os.unlink(self._temporary)

    def _of_path(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror or str(error), self._path)
