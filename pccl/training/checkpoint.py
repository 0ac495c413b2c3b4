"""A peer's training state on disk: a file that is there is whole.

The file is an ordinary `.npz` without pickles. It is written beside its final name, flushed to the disk, and renamed: a
crash at any moment leaves the previous file. The archive's CRC-32s tell a damaged one.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

FORMAT = 1


class CheckpointError(Exception):
    """A file that is damaged, of another format, or of another model."""


class Stateful(Protocol):
    """What can be saved beside the outer state: a torch optimizer, or an object of the user's.

    With NumPy models `state_dict()` must give a mapping of names to arrays or numbers, with torch what `torch.save`
    writes and `torch.load(weights_only=True)` reads.
    """

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def save(path: Path, contents: Mapping[str, Any]) -> None:
    """Writes `contents` to `path`, replacing what was there at once. OSError."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            np.savez(file, allow_pickle=False, format=FORMAT, **contents)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    folder = os.open(path.absolute().parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # else the new name may be lost with the power
    finally:
        os.close(folder)


def load(path: Path) -> dict[str, NDArray[Any]]:
    """What `save` wrote. OSError, or CheckpointError."""
    try:
        # An open file of our own: np.load leaves one behind where it fails.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            contents = dict(archive)
    except (zipfile.BadZipFile, ValueError, EOFError, KeyError) as error:
        raise CheckpointError(f"{path} is damaged or no checkpoint: {error}") from error
    if int(contents.pop("format", np.array(-1))) != FORMAT:
        raise CheckpointError(f"{path} was not written by this version of pccl.training (format {FORMAT})")
    return contents
