"""A file that is replaced as a whole, or not at all.

The new content goes to a temporary file in the same folder, which is made first, so that an unwritable place is an
error before there is content. Pipes and devices are written directly.
"""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from types import TracebackType

Path = str | os.PathLike[str]


class Replacement:
    """The new content of a file, as a context manager that removes an unfinished file. OSErrors name the path."""

    def __init__(self, path: Path) -> None:
        self._path = os.fspath(path)
        self._target = os.path.realpath(path)
        self._temporary: str | None = None
        try:
            if os.path.exists(self._path) and not stat.S_ISREG(os.stat(self._path).st_mode):
                self._file = open(self._path, "wb", buffering=0)  # noqa: SIM115 - closed by `__exit__`
                return
            temporary = os.path.join(os.path.dirname(self._target), f".pccl-{os.urandom(8).hex()}.part")
            self._file = open(temporary, "xb", buffering=0)  # noqa: SIM115
            self._temporary = temporary
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from None

    def __enter__(self) -> Replacement:
        return self

    def write(self, content: bytes) -> None:
        """Write all of the content, and put it in place. To be called once."""
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
            raise OSError(error.errno, error.strerror, self._path) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with suppress(OSError):
            self._file.close()
        if self._temporary is not None:
            with suppress(OSError):
                os.unlink(self._temporary)
