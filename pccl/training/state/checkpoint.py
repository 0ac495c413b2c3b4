"""Checkpoints: `save` and `load` for all training classes, in one format.

A checkpoint is one file, `step-000000123.safetensors`, in a folder of the peer's own. Each rank of a site writes one,
`step-000000123.rank-00002-of-00004.safetensors`. The model's tensors have their names in `state_dict()`, so that any
tool can read them. The names of all other tensors begin with `pccl/`: those of the optimizer, and one that holds
everything else as encoded by `pccl.training.state.codec`. The metadata has class, model, revision, history (see
`pccl.training.group.membership`), and a name of the save that is the same on all ranks of a site. For a background
save, `save` copies the tensors and a non-daemon thread writes the file. Files of another history are never deleted:
`keep` does not count them, and one that has the new file's name is renamed.

The ranks of a site gather the revisions and saves that each holds, and load the newest save that all hold. If there is
none, or the file of any rank is damaged, all ranks fail before any state changes.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import pccl
from pccl import Communicator, PCCLError, Result, SharedState
from pccl._integers import as_int
from pccl.training.group.membership import Membership
from pccl.training.group.site import Site
from pccl.training.state import codec, tensor_file
from pccl.training.state.replica import plain_name
from pccl.training.state.replicated_state import ReplicatedState
from pccl.training.state.tensor_file import (
    CheckpointError,
    Contents,
    Entry,
    HostMemory,
    Shard,
    encode,
    entry_of,
    tensor_of,
)

FORMAT = 3
MANIFEST = "pccl"
REST = "rest"
OURS = "pccl/"
"""The prefix of tensors that are not in the model's `state_dict()`. Up to format 2, all names were paths."""
MODEL = ("parameters", "buffers")
NAME = re.compile(r"step-(\d{9,})(?:\.rank-(\d{5,})-of-(\d{5,}))?\.safetensors")
SUFFIX = ".safetensors"

RENAMED = "%s is from another run and was renamed to %s: use one folder per run"
NEWER = "%s holds checkpoints newer than revision %d, and load would choose revision %d: use one folder per run"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state that a training object saves. It can be loaded only where layout and options are the same."""

    revision: int
    state: dict[str, Any]
    """A nested state, which shares tensors with the object until they are copied or written."""
    layout: str
    options: str = ""
    history: int = 0
    unnamed: Collection[str] = ()
    """The names of buffers that are not in the model's `state_dict()`."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A checkpoint of this rank on disk."""

    path: Path
    revision: int
    save: str
    """The unique name of the save, the same on all ranks of a site."""


def file_name(revision: int, site: Site | None) -> str:
    rank = f".rank-{site.rank:05d}-of-{site.size:05d}" if site is not None else ""
    return f"step-{revision:09d}{rank}.safetensors"


def is_one_file(path: Path) -> bool:
    """Return whether `path` is a checkpoint file, rather than a folder of checkpoints."""
    return path.suffix == SUFFIX or path.is_file()


def _named(folder: Path, site: Site | None) -> list[tuple[int, Path]]:
    """Return revision and path of this rank's files with checkpoint names, newest first. Raises FileNotFoundError."""
    place = (site.rank, site.size) if site is not None else None
    found = []
    for path in folder.iterdir():
        match = NAME.fullmatch(path.name)
        if match is not None and ((match[2] and (int(match[2]), int(match[3]))) or None) == place:
            found.append((int(match[1]), path))
    return sorted(found, reverse=True)


def _facts_of(path: Path) -> tuple[str, int] | None:
    """Return the save's name ("" if the file is damaged) and its history, or None if it is gone or not a checkpoint."""
    try:
        metadata = tensor_file.read_metadata(path)
        manifest = _manifest(metadata, path) if MANIFEST in metadata else None
        return (str(manifest.get("save", "")), int(manifest.get("history", 0))) if manifest is not None else None
    except FileNotFoundError:
        return None
    except CheckpointError:
        return "", 0


def pieces(folder: Path, site: Site | None = None) -> list[Piece]:
    """Return this rank's checkpoints in `folder`, newest first. Raises FileNotFoundError."""
    found = _named(folder, site)
    return [
        Piece(path, revision, (_facts_of(path) or ("", 0))[0] if site is not None else "") for revision, path in found
    ]


def piece_at(path: Path) -> Piece:
    """Return the checkpoint in the file `path`. Raises OSError, CheckpointError."""
    manifest = _manifest(tensor_file.read_metadata(path), path)
    return Piece(path, int(manifest.get("revision", 0)), str(manifest.get("save", "")))


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint in `folder` that is not part of a site's checkpoint, or None."""
    try:
        return next((path for _, path in _named(Path(folder), None)), None)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _manifest(metadata: Mapping[str, str], path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads(metadata[MANIFEST])
        version = int(manifest["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged or not a checkpoint: it has no manifest ({error!r})") from None
    if version > FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, from pccl {manifest.get('version')}; this is pccl {pccl.__version__}, which "
            f"reads formats up to {FORMAT}: upgrade it"
        )
    assert isinstance(manifest, dict)
    return manifest


def load(path: Path, site: Site | None, shard: Callable[[Any, Shard], Any]) -> tuple[str, Snapshot]:
    """Read and verify a checkpoint, and return the name of its class and its state.

    `shard` creates a distributed tensor from this rank's part. Raises OSError, CheckpointError.
    """
    contents = tensor_file.read(path)
    manifest = _manifest(contents.metadata, path)
    rank, size = (site.rank, site.size) if site is not None else (0, 1)
    if (manifest["rank"], manifest["size"]) != (rank, size):
        raise CheckpointError(
            f"{path} belongs to rank {manifest['rank']} of {manifest['size']}; this is rank {rank} of {size}"
        )
    names = manifest.get("names", {})
    entries = {names.get(name, name.removeprefix(OURS)): entry for name, entry in contents.entries.items()}
    try:
        rest = entries.pop(REST).data.tobytes()
        of_torch = set(manifest["torch"])
        tensors = {name: tensor_of(entry, name in of_torch) for name, entry in entries.items()}
        for name, (place, shape, stride) in manifest["shards"].items():
            tensors[name] = shard(tensors[name], Shard(place, tuple(shape), tuple(stride)))
        state = codec.decode(rest, tensors)
        for part in (*MODEL, "common buffers"):
            if isinstance(state.get(part), dict):
                state[part] = {plain_name(name): value for name, value in state[part].items()}
        layout = plain_name(manifest["layout"])
        history = int(manifest.get("history", 0))
        return manifest["class"], Snapshot(manifest["revision"], state, layout, manifest["options"], history)
    except (KeyError, ValueError, TypeError, StopIteration) as error:
        raise CheckpointError(f"{path} cannot be read: {error!r}; if it holds torch tensors, import torch") from error


@dataclass(slots=True)
class _Save:
    """A save in progress, or a failed save whose error has not been raised."""

    keep: int | None
    path: Path
    revision: int = -1
    history: int = 0
    thread: threading.Thread | None = None
    error: BaseException | None = None
    is_raised: bool = False


class Checkpoints:
    """Writes the checkpoints of one training object. Not thread-safe."""

    def __init__(self, kind: str, site: Site | None = None) -> None:
        self._kind = kind
        self._site = site
        self._memory = HostMemory()
        self._pending: _Save | None = None

    def save(self, path: Path, take: Callable[[], Snapshot], *, keep: int | None, background: bool) -> None:
        """Save the snapshot from `take`. Raises ValueError, or OSError from this or the previous background save."""
        is_file = is_one_file(path)
        if keep is not None:
            keep = as_int("keep", keep, 1)
            if is_file:
                raise ValueError(f"keep {keep}: {path} must be a folder")
        # This group call comes before anything that can fail on only some ranks.
        name = self._site.unique_name() if self._site is not None else uuid.uuid4().hex
        prune = self._settle()
        save = self._pending = _Save(keep, path)
        try:
            snapshot = take()
            contents = self._contents(snapshot, name, self._memory.copies if background else _entries)
        except BaseException as error:
            save.error, save.is_raised = error, True
            raise
        save.revision, save.history = snapshot.revision, snapshot.history
        save.path = path if is_file else path / file_name(snapshot.revision, self._site)
        work = partial(self._write, save, contents, prune, is_file)
        if background:
            save.thread = threading.Thread(target=work, name=f"saves {save.path.name}", daemon=False)
            save.thread.start()
        else:
            work()
            self.wait()

    def wait(self) -> None:
        """Wait until the most recent save is on disk. Raises OSError from a background save.

        With a site and `keep`, all ranks must call it, and it fails on all if it fails on one.
        """
        prune = self._settle()
        if prune is not None:
            prune()

    def _settle(self) -> Callable[[], None] | None:
        """Wait for the save in progress and raise its error. Return a function that deletes older ones, if due."""
        save = self._pending
        if save is None:
            return None
        if save.thread is not None:
            save.thread.join()
        self._pending = None
        is_joint = self._site is not None and save.keep is not None
        is_saved = save.error is None
        is_saved_by_all = self._site.agree(is_saved) if self._site is not None and is_joint else is_saved
        if save.error is not None and not save.is_raised:
            raise save.error
        if is_joint and not is_saved_by_all:
            raise CheckpointError("a rank of this site could not save the last checkpoint; no older one was deleted")
        if save.keep is None or not is_joint:
            return None
        return partial(_prune, save.path.parent, save, save.keep, self._site)

    def _write(self, save: _Save, contents: Contents, prune: Callable[[], None] | None, is_file: bool) -> None:
        try:
            if prune is not None:
                prune()
            if not is_file:
                folder = save.path.parent
                tensor_file.make_folder(folder)
                newer = [revision for revision, _ in _named(folder, self._site) if revision > save.revision]
                if newer:
                    logger.warning(NEWER, folder, save.revision, newer[0])
                if save.history and (_facts_of(save.path) or ("", save.history))[1] not in (save.history, 0):
                    other = save.path.with_suffix(f".other{SUFFIX}")
                    save.path.rename(other)
                    logger.warning(RENAMED, save.path, other.name)
            tensor_file.write(save.path, contents)
            if save.keep is not None and self._site is None:
                _prune(save.path.parent, save, save.keep, None)
            logger.info("saved %s", save.path)
        except BaseException as error:  # raised later, on the caller's thread
            save.error = error
            if save.thread is not None:
                logger.error("cannot save %s; the next save will raise this error: %r", save.path, error)

    def _contents(
        self, snapshot: Snapshot, save: str, to_entries: Callable[[Mapping[str, Any]], dict[str, Entry]]
    ) -> Contents:
        data, tensors, shards = encode(snapshot.state)
        names = {path: _name(path, snapshot.unnamed) for path in tensors}
        rest = Entry("U8", (len(data),), np.frombuffer(data, np.uint8))
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
            "history": snapshot.history,
            "torch": [name for name, tensor in tensors.items() if not isinstance(tensor, np.ndarray)],
            "shards": {name: [each.place, each.shape, each.stride] for name, each in shards.items()},
            "names": {name: path for path, name in names.items() if not name.startswith(OURS)},
        }
        entries = {names[path]: entry for path, entry in to_entries(tensors).items()}
        return Contents({MANIFEST: json.dumps(manifest)}, {OURS + REST: rest, **entries})


def _name(path: str, unnamed: Collection[str]) -> str:
    """Return the name in a file of the tensor at this path of the state."""
    part, _, name = path.partition("/")
    is_models = part in MODEL and name and name not in unnamed and not name.startswith(OURS)
    return name if is_models else OURS + path


def _entries(tensors: Mapping[str, Any]) -> dict[str, Entry]:
    return {name: entry_of(tensor) for name, tensor in tensors.items()}


def _prune(folder: Path, save: _Save, keep: int, site: Site | None) -> None:
    """Delete all but the newest `keep` checkpoints of this history up to the revision of `save`."""
    kept = 0
    for own, path in _named(folder, site):
        if own > save.revision or (facts := _facts_of(path)) is None:
            continue
        if facts[0] and facts[1] != save.history:
            continue
        if kept < keep:
            kept += 1
        else:
            path.unlink(missing_ok=True)


class Checkpointed(ABC):
    """The base of the training classes, which saves the result of `_snapshot` and loads it with `_restore`."""

    _communicator: Communicator
    _state: SharedState
    _replicated: ReplicatedState
    _membership: Membership
    _site: Site | None = None
    _checkpoints: Checkpoints | None = None

    LOADS: tuple[str, ...] = ()
    """Other classes whose checkpoints this class can load."""

    @property
    def revision(self) -> int:
        """The number of steps of the whole run; for DiLoCo, of outer updates."""
        return self._state.revision

    @property
    def rank(self) -> int:
        """`Communicator.rank`, which changes with the membership. Exactly one peer has rank 0 between two steps."""
        return self._communicator.rank

    def digest(self) -> str:
        """Return the hexadecimal BLAKE3 digest of the replicated state, the same on all peers after every step."""
        return self._replicated.snapshot(self.revision).digest().hex()

    @abstractmethod
    def _snapshot(self) -> Snapshot:
        """Return the state that determines the next step, without copying it."""

    @abstractmethod
    def _restore(self, state: dict[str, Any], revision: int) -> None:
        """Load the state from `_snapshot`. Raises CheckpointError before anything is changed."""

    def _shard(self, tensor: Any, shard: Shard) -> Any:
        raise CheckpointError(f"it has part of a sharded tensor, {shard.place}; this model has none")

    def save(self, path: str | os.PathLike[str], *, keep: int | None = None, background: bool = False) -> None:
        """Save this peer's state between two steps, durably and atomically. With a site, all ranks call it.

        Args:
            path: A folder of this peer's own, in which `step-000000123.safetensors` is created; or, with the suffix
                `.safetensors`, the file itself, which is replaced.
            keep: The number of newest files of this run to keep; None keeps all. Files of other runs always stay.
            background: Copy the state, and write it while training continues. The next save waits for this one and
                raises its error, as does `wait_for_save`.

        Raises OSError, or ValueError with the path of a part of the state that cannot be saved.
        """
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(type(self).__name__, self._site)
        history = self._replicated.history

        def take() -> Snapshot:
            return replace(self._snapshot(), history=history)

        self._checkpoints.save(Path(path).absolute(), take, keep=keep, background=background)

    def close(self) -> None:
        """End this object's training, so that another may join on its communicator.

        All peers call it at the same point. Raises DivergenceError, and OSError from a background save.
        """
        try:
            if self._membership.is_under_way and sys.exc_info()[0] is None:
                self._membership.part()
        finally:
            self._membership.retire()
            self.wait_for_save()

    def wait_for_save(self) -> None:
        """Wait until the most recent save is on disk. Raises OSError if a background save failed."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def load(self, path: str | os.PathLike[str], *, missing_ok: bool = False) -> bool:
        """Load a checkpoint before `join`: the file `path`, or the newest one in the folder `path`.

        Peers that start a run may load different steps, or none; they join with the newest state. With a site, all
        ranks call it and load the newest step that all have.

        Args:
            path: A folder or a file.
            missing_ok: Return False if there is no checkpoint.

        Raises:
            OSError: The checkpoint cannot be read.
            CheckpointError: It is damaged, from another model, class or newer version, or the ranks share no step.
            PCCLError: INVALID_USAGE if this peer has joined. No state has changed.
        """
        self._require_not_joined()
        found, error = [], ""
        try:
            found = self._found(Path(path))
        except (OSError, CheckpointError) as caught:
            if self._site is None and not (missing_ok and isinstance(caught, FileNotFoundError)):
                raise
            if not isinstance(caught, FileNotFoundError):
                error = str(caught)
        if self._site is None:
            if not found:
                return False
            piece = found[0]
        else:
            held = self._gathered(found, error)
            if missing_ok and not any(held):
                return False
            piece = found[held[self._site.rank].index(_newest_common(held, path))]
        loaded = self._loaded(piece)
        self._restore(loaded.state, loaded.revision)
        self._replicated.history = loaded.history or self._replicated.history
        logger.info("loaded %s, revision %d", piece.path, loaded.revision)
        return True

    def _require_not_joined(self) -> None:
        if not self._membership.is_in_run:
            return  # not joined, or left; `reconnect` joins with the loaded state
        what = "this peer is in a run, whose other peers would not have the loaded state: call load before join"
        raise PCCLError(Result.INVALID_USAGE, f"{type(self).__name__}.load", what)

    def _found(self, path: Path) -> list[Piece]:
        if is_one_file(path):
            path.stat()
            return [piece_at(path) if self._site is not None else Piece(path, 0, "")]
        found = pieces(path, self._site)
        if not found:
            others = sorted(entry.name for entry in path.iterdir() if entry.name.startswith("step-"))
            what = f"; it holds {others[-1]}, from another rank or a site of another size" if others else ""
            raise FileNotFoundError(f"{path} holds no checkpoint of this rank{what}")
        return found

    def _gathered(self, found: list[Piece], error: str) -> list[list[tuple[int, str]]]:
        assert self._site is not None
        mine = {"error": error, "pieces": [(piece.revision, piece.save) for piece in found]}
        ranks = [json.loads(text) for text in self._site.gather(json.dumps(mine))]
        _raise_any(each["error"] for each in ranks)
        return [[(revision, save) for revision, save in each["pieces"]] for each in ranks]

    def _loaded(self, piece: Piece) -> Snapshot:
        error: OSError | CheckpointError | None = None
        snapshot = None
        try:
            snapshot = self._checked(piece.path, *load(piece.path, self._site, self._shard))
        except (OSError, CheckpointError) as caught:
            error = caught
        if self._site is not None:
            _raise_any(self._site.gather(str(error) if error is not None else ""))
        if error is not None:
            raise error
        assert snapshot is not None
        return snapshot

    def _checked(self, path: Path, kind: str, snapshot: Snapshot) -> Snapshot:
        if kind not in (type(self).__name__, *self.LOADS):
            raise CheckpointError(f"{path} was saved by {kind}; this is {type(self).__name__}")
        own = self._snapshot()
        classes = [each.state.get("optimizer class") for each in (snapshot, own)]
        if None not in classes and classes[0] != classes[1]:
            raise CheckpointError(f"{path} has the state of a {classes[0]}; the optimizer here is a {classes[1]}")
        for what, theirs, ours in (("model", snapshot.layout, own.layout), ("run", snapshot.options, own.options)):
            if theirs != ours:
                raise CheckpointError(f"{path} is from another {what}: {_first_difference(theirs, ours)}")
        shared = [each.state.get("shared", {}).keys() for each in (snapshot, own)]
        for name in sorted(shared[0] ^ shared[1]):
            here, there = ("is not shared here", "has it") if name in shared[0] else ("stays unchanged", "lacks it")
            logger.warning("%r %s: %s %s", name, here, path, there)
        return snapshot


def _newest_common(held: list[list[tuple[int, str]]], path: str | os.PathLike[str]) -> tuple[int, str]:
    common = set(held[0]).intersection(*held[1:])
    listed = "; ".join(
        f"rank {rank} has {', '.join(str(revision) for revision, _ in sorted(own)) or 'none'}"
        for rank, own in enumerate(held)
    )
    if not common:
        raise CheckpointError(
            f"the ranks of this site have no save in common in {os.fspath(path)}: {listed}; give all the same save"
        )
    newest = max(common)
    if any(revision > newest[0] for own in held for revision, _ in own):
        logger.warning("revision %d is the newest that all ranks of this site have: %s", newest[0], listed)
    return newest


def _raise_any(errors: Iterable[str]) -> None:
    failed = [f"rank {rank}: {error}" for rank, error in enumerate(errors) if error]
    if failed:
        raise CheckpointError(f"this site cannot load its checkpoint; {'; '.join(failed)}")


def _first_difference(theirs: str, ours: str) -> str:
    for a, b in zip(theirs.splitlines(), ours.splitlines(), strict=False):
        if a != b:
            return f"it has {a!r}, but this one has {b!r}"
    return f"it has {theirs.count(chr(10)) + 1} parameters, but this one has {ours.count(chr(10)) + 1}"
