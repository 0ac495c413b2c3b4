"""A peer's training state on disk: one format for all training classes.

Theory of operation. A checkpoint is one file, `step-000000123.safetensors`, in a folder of the peer's own; of a model
in shards each rank of the site writes one, `step-000000123.rank-00002-of-00004.safetensors`. Tensors are in it under
their names, everything else as `pccl.training.state_codec` encodes it, and the metadata say in JSON which class, model
and revision it is of, and which save: a name that all ranks of a site give alike. `pccl.training.tensor_file` has the
format, and why a file that is there is whole.

*In the background*: `save` copies the tensors into memory of its own, which it uses again each time, and returns; a
thread flushes them to the disk. A second save waits for the first, because it needs that memory. What fails in the
thread is logged at once and raised by the next `save` or `wait`. The thread is no daemon: a program that ends, with an
exception too, ends when the file is whole.

*Which are kept*: `keep` counts this rank's files. Older ones go when the new one is flushed, and of a site when it is
on all ranks (`Site.agree`), or else a site that died between two ranks' saves would have no step that all of them have.
Revisions above the saved one stay, and so does everything that is no checkpoint of this library's.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import pccl
from pccl.training import state_codec, tensor_file
from pccl.training.site import Site
from pccl.training.tensor_file import CheckpointError, Contents, Entry
from pccl.training.tensor_tree import HostMemory, Parts, Shard, entry_of, join, split, tensor_of

FORMAT = 2
FORMER_FORMAT = 1
"""An npz without a manifest."""
MANIFEST = "pccl"
REST = "rest"
"""Of the state, beside its tensors."""
NAME = re.compile(r"step-(\d{9,})(?:\.rank-(\d{5,})-of-(\d{5,}))?\.safetensors")
ONE_FILE = (".safetensors", ".npz")
"""A path that ends so is the file itself."""

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """What can be saved beside the model: a torch optimizer, or an object of the user's.

    `state_dict()` gives what `pccl.training.state_codec` encodes, with tensors and arrays anywhere in it.
    """

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a training object saves, and gets back."""

    revision: int
    state: dict[str, Any]
    """Nested; tensors are shared with the object until they are copied or written."""
    layout: str
    """A line for each tensor of the model: name, shape, dtype. Who loads it must have the same."""
    options: str = ""
    """What else must be the same, a line each."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A checkpoint on disk, of this rank. Its name is what the ranks of a site compare."""

    path: Path
    revision: int
    save: str
    """The same on all ranks of a site, and of no other save of theirs; "" in files of former versions."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint that was read and is whole."""

    path: Path
    kind: str
    """The name of the class; "" in files of former versions."""
    snapshot: Snapshot
    former: dict[str, NDArray[Any]] = field(default_factory=dict)
    """The arrays of a file of a former version, which has no state."""


def file_name(revision: int, site: Site | None) -> str:
    rank = f".rank-{site.rank:05d}-of-{site.size:05d}" if site is not None else ""
    return f"step-{revision:09d}{rank}.safetensors"


def is_one_file(path: Path) -> bool:
    """Whether `path` is a checkpoint itself, and not a folder of them."""
    return path.suffix in ONE_FILE or path.is_file()


def pieces(folder: Path, site: Site | None = None) -> list[Piece]:
    """This rank's checkpoints in `folder`, oldest first, whole ones: none has another name. FileNotFoundError."""
    place = (str(site.rank), str(site.size)) if site is not None else (None, None)
    found = []
    for path in folder.iterdir():
        match = NAME.fullmatch(path.name)
        if match is None or tuple(text and str(int(text)) for text in match.groups()[1:]) != place:
            continue
        try:
            manifest = _manifest(tensor_file.read_metadata(path), path)
        except FileNotFoundError:
            continue  # deleted meanwhile, by its `keep`
        except CheckpointError as error:
            logger.warning("%s; it is counted as a damaged checkpoint", error)
            manifest = {}
        if manifest is not None:
            found.append(Piece(path, int(match[1]), str(manifest.get("save", ""))))
    return sorted(found, key=lambda piece: piece.revision)


def piece_at(path: Path) -> Piece:
    """The checkpoint that is the file `path`. OSError, CheckpointError."""
    manifest = _manifest(tensor_file.read_metadata(path), path)
    if manifest is None:
        return Piece(path, _load_former(path, tensor_file.read(path)).snapshot.revision, "")
    return Piece(path, int(manifest.get("revision", 0)), str(manifest.get("save", "")))


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint in `folder` that is no piece of a site's, or None."""
    try:
        found = pieces(Path(folder))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found[-1].path if found else None


def _manifest(metadata: Mapping[str, str], path: Path) -> dict[str, Any] | None:
    """None: it is somebody else's file."""
    if MANIFEST not in metadata:
        return None
    try:
        manifest = json.loads(metadata[MANIFEST])
        version = int(manifest["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: its manifest is none of pccl.training's ({error!r})") from None
    if version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, of pccl {manifest.get('version')}; this is pccl {pccl.__version__}, which "
            f"reads up to {FORMAT}: upgrade it"
        )
    assert isinstance(manifest, dict)
    return manifest


def load(path: Path, site: Site | None = None, shard: Callable[[Any, Shard], Any] | None = None) -> Loaded:
    """Reads a checkpoint and verifies it. `shard` makes a distributed tensor of this rank's part. OSError,
    CheckpointError."""
    contents = tensor_file.read(path)
    manifest = _manifest(contents.metadata, path)
    if manifest is None:
        return _load_former(path, contents)
    rank, size = (site.rank, site.size) if site is not None else (0, 1)
    if (manifest["rank"], manifest["size"]) != (rank, size):
        raise CheckpointError(
            f"{path} is the piece of rank {manifest['rank']} of {manifest['size']}; this is rank {rank} of {size}"
        )
    entries = dict(contents.entries)
    try:
        rest = state_codec.decode(entries.pop(REST).data.tobytes())
        of_torch = set(manifest["torch"])
        tensors = {name: tensor_of(entry, name in of_torch) for name, entry in entries.items()}
        shards = {name: Shard(each[0], tuple(each[1]), tuple(each[2])) for name, each in manifest["shards"].items()}
        state = join(Parts(rest, tensors, shards), shard)
        snapshot = Snapshot(manifest["revision"], state, manifest["layout"], manifest["options"])
        return Loaded(path, manifest["class"], snapshot)
    except (KeyError, ValueError, TypeError, StopIteration) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}; was torch imported, if it is of torch's?") from error


def _load_former(path: Path, contents: Contents) -> Loaded:
    arrays = {name: entry.array() for name, entry in contents.entries.items()}
    if "format" not in arrays or contents.metadata:
        raise CheckpointError(f"{path} is no checkpoint: pccl.training has not written it")
    if (version := int(arrays.pop("format"))) != FORMER_FORMAT:
        raise CheckpointError(f"{path} was not written by pccl.training: it has format {version}")
    revision = int(arrays.get("revision", np.array(0)))
    return Loaded(path, "", Snapshot(revision, {}, ""), arrays)


@dataclass(slots=True)
class _Save:
    """A save under way, or one whose end nobody has asked for."""

    path: Path
    revision: int
    keep: int | None
    thread: threading.Thread | None = None
    error: BaseException | None = None


class Checkpoints:
    """Writes the checkpoints of one training object. Not thread-safe."""

    def __init__(self, kind: str, site: Site | None = None) -> None:
        self._kind = kind
        self._site = site
        self._memory = HostMemory()
        self._pending: _Save | None = None
        self._own_name = uuid.uuid4().hex
        self._saves = 0

    def save(self, path: Path, take: Callable[[], Snapshot], *, keep: int | None, background: bool) -> Path:
        """Saves what `take` gives, and returns the file's path. OSError, also of the last save, where that was in the
        background; ValueError for other arguments, and a state that cannot be encoded."""
        if keep is not None and keep < 1:
            raise ValueError(f"keep {keep}: must be at least 1, or None to keep all")
        if keep is not None and is_one_file(path):
            raise ValueError(f"keep {keep} needs a folder, where each step has a file; {path} is one file")
        name = self._next_name()  # first: one that fails on some ranks alone counts on all
        started_s = time.monotonic()
        was_pending = self._pending is not None and self._pending.thread is not None and self._pending.thread.is_alive()
        self.wait()
        if was_pending:
            waited_s = time.monotonic() - started_s
            slow = "saving is slower than the steps between: this save waited %.3g s for the last one; save less often"
            logger.warning(slow, waited_s)
        snapshot = take()
        contents = self._contents(snapshot, name, self._memory.copies if background else _entries)
        if is_one_file(path):
            target = path
        else:
            path.mkdir(parents=True, exist_ok=True)
            target = path / file_name(snapshot.revision, self._site)
            self._warn_of_newer(path, snapshot.revision)
        save = self._pending = _Save(target, snapshot.revision, keep)
        if background:
            save.thread = threading.Thread(
                target=self._write, args=(save, contents), name=f"saves {target.name}", daemon=False
            )
            save.thread.start()
        else:
            self._write(save, contents)
            self.wait()
        return target

    def _next_name(self) -> str:
        if self._site is not None:
            return self._site.unique_name()
        self._saves += 1
        return f"{self._own_name}.{self._saves}"

    def wait(self) -> None:
        """Returns when what was saved is on the disk. OSError of a save in the background. With a site and `keep` a
        joint call of its ranks, as `save`."""
        save = self._pending
        if save is None:
            return
        if save.thread is not None:
            save.thread.join()
        self._pending = None
        if save.keep is not None and self._site is not None:
            if self._site.agree(save.error is None):
                _prune(save.path.parent, save.revision, save.keep, self._site)
            elif save.error is None:
                logger.error("another rank of this site could not save revision %d; no older is deleted", save.revision)
        if save.error is not None:
            raise save.error

    def _write(self, save: _Save, contents: Contents) -> None:
        try:
            tensor_file.write(save.path, contents)
            if save.keep is not None and self._site is None:
                _prune(save.path.parent, save.revision, save.keep, None)
            logger.info("saved %s", save.path)
        except BaseException as error:  # raised by `wait`, where the caller is
            save.error = error
            if save.thread is not None:
                logger.error("saving %s failed, which the next save will raise: %r", save.path, error)

    def _contents(
        self, snapshot: Snapshot, save: str, to_entries: Callable[[Mapping[str, Any]], dict[str, Entry]]
    ) -> Contents:
        parts = split(snapshot.state)
        rest = Entry("U8", (len(data := state_codec.encode(parts.rest)),), np.frombuffer(data, np.uint8))
        manifest = {
            "format": FORMAT,
            "version": pccl.__version__,
            "class": self._kind,
            "revision": snapshot.revision,
            "save": save,
            "rank": self._site.rank if self._site is not None else 0,
            "size": self._site.size if self._site is not None else 1,
            "layout": snapshot.layout,
            "options": snapshot.options,
            "torch": [name for name, tensor in parts.tensors.items() if not isinstance(tensor, np.ndarray)],
            "shards": {name: [each.place, each.shape, each.stride] for name, each in parts.shards.items()},
        }
        return Contents({MANIFEST: json.dumps(manifest)}, {REST: rest, **to_entries(parts.tensors)})

    def _warn_of_newer(self, folder: Path, revision: int) -> None:
        newer = [piece.revision for piece in pieces(folder, self._site) if piece.revision > revision]
        if newer:
            what = "%s holds checkpoints newer than revision %d, of which %d will be loaded: use a folder for each run"
            logger.warning(what, folder, revision, max(newer))


def _entries(tensors: Mapping[str, Any]) -> dict[str, Entry]:
    return {name: entry_of(tensor) for name, tensor in tensors.items()}


def _prune(folder: Path, revision: int, keep: int, site: Site | None) -> None:
    """Deletes all but the newest `keep` of those up to `revision`."""
    older = [piece for piece in pieces(folder, site) if piece.revision <= revision]
    for piece in older[:-keep]:
        piece.path.unlink(missing_ok=True)
